"""What the page asks of a model: plain functions of what was asked, so that tabs share nothing.

Symbols: T positions, d the width of a state, V tokens, h `[T, d]`, z logits `[V]`.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lmhead import __version__
from lmhead.body.adding import blocks_of
from lmhead.errors import BadInput, LMHeadError
from lmhead.loading import Model
from lmhead.progress import Progress
from lmhead.sampling import ORDERS, SamplingParams
from lmhead.sampling.breakers import breakers_of
from lmhead.sampling.params import FILTERS, RANGES

ALTERNATIVES = 6  # tokens told beside the one that came
COLOURED = 512  # positions, from the end, whose log-probability is told
POSITIONS = 64  # of the lens, from the end
_LOGITS_AT_ONCE = 1 << 23
_REMEMBERED = 8  # prompts whose logits are kept
_CARRIES = "�"


class Explorer:
    """A model, and what was computed of it; nothing here belongs to a tab."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._states: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._remembering = threading.Lock()

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the page needs to know of the model and of the sampler."""
        model = self.model
        try:
            blocks = len(blocks_of(model.body.model))
        except LMHeadError:
            blocks = None
        guided = FILTERS["guided"].switches
        return {
            "version": __version__,
            "model": model.name,
            "vocab_size": model.head.vocab_size,
            "reachable": model.reachable,
            "hidden_size": model.head.hidden_size,
            "blocks": blocks,
            "tied": model.head.tied,
            "softcap": model.head.softcap,
            "context": model.body.context,
            "chat": model.has_chat_template,
            "stop_ids": list(model.stop_ids),
            "orders": {name: [f for f in order if f != "guided"] for name, order in ORDERS.items()},
            "filters": {
                name: {"switches": list(f.switches), "details": list(f.details)}
                for name, f in FILTERS.items()
                if name != "guided"
            },
            "defaults": {
                name: value
                for name, value in SamplingParams().to_dict().items()
                if name not in guided
            },
            "ranges": {
                name: [r.low, None if r.high == float("inf") else r.high, r.whole]
                for name, r in RANGES.items()
            },
        }

    @cached_property
    def tokens(self) -> list[str]:
        """The text of every token as it stands within a text, `[reachable]`."""
        model, V = self.model, self.model.reachable
        backend = getattr(model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [model.token_text(i) for i in range(V)]
        anchor = model._anchor
        before = model.tokenizer.decode([anchor])
        texts = backend.decode_batch([[anchor, i] for i in range(V)], skip_special_tokens=False)
        known = [
            text[len(before) :]
            if text.startswith(before) and text != before and _CARRIES not in text
            else None
            for text in texts
        ]
        return [model.token_text(i) if text is None else text for i, text in enumerate(known)]

    @cached_property
    def tokens_tag(self) -> str:
        """What changes when the texts do."""
        return hashlib.sha256("\0".join(self.tokens).encode()).hexdigest()[:16]

    @cached_property
    def _breakers(self) -> dict[int, Any]:
        try:
            return dict(breakers_of(self.model.tokenizer, SamplingParams().dry_sequence_breakers))
        except BadInput:  # no fast tokenizer
            return {}

    def ids(self, prompt: str, more: Sequence[int], chat: bool = False) -> list[int]:
        """Return the ids of a prompt and of the tokens that were appended to it."""
        start = self.model.encode(prompt, chat=chat)
        return self.model.encode([*start, *more])

    @torch.inference_mode()
    def state(self, ids: Sequence[int]) -> Tensor:
        """Return what enters the head, `[T, d]`; the last few prompts are remembered."""
        key = tuple(ids)
        with self._remembering:
            if key in self._states:
                self._states.move_to_end(key)
                known: Tensor = self._states[key]
                return known
        states, _ = self.model.body(torch.tensor([list(ids)]), use_cache=False)
        h: Tensor = states[0]
        with self._remembering:
            self._states[key] = h
            while len(self._states) > _REMEMBERED:
                self._states.popitem(last=False)
        return h

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of the next token, `[reachable]` float32."""
        z: Tensor = self.model.head(self.state(ids)[-1])
        return z[: self.model.reachable].float().cpu()

    @torch.inference_mode()
    def read(
        self, prompt: str, more: Sequence[int], chat: bool, cut: Sequence[int] | None
    ) -> dict[str, Any]:
        """Tell each token of a sequence with its log-probability, rank and the alternatives.

        `cut` is (position, id): the sequence ends before the position and goes on with the id.
        """
        if cut is not None:
            prompt, more = self._cut(prompt, more, chat, *cut)
        start = self.model.encode(prompt, chat=chat)
        ids = self.model.encode([*start, *more])
        h = self.state(ids)
        text = self.model.token_text
        tokens: list[dict[str, Any]] = [{"id": i, "text": text(i)} for i in ids]
        V, first = self.model.reachable, max(1, len(ids) - COLOURED)
        step = max(1, _LOGITS_AT_ONCE // V)
        for at in range(first, len(ids), step):
            end = min(at + step, len(ids))
            z = self.model.head(h[at - 1 : end - 1])[:, :V].float()
            lp = z.double().log_softmax(-1)
            best = lp.topk(min(ALTERNATIVES, V))
            for row in range(end - at):
                own = min(ids[at + row], V - 1)
                tokens[at + row] |= {
                    "logprob": float(lp[row, own]),
                    "rank": int((z[row] > z[row, own]).sum()) + 1,
                    "entropy": float(-(lp[row].exp() * lp[row]).nan_to_num(0.0).sum()),
                    "top": [
                        [i, p, text(i)]
                        for i, p in zip(
                            best.indices[row].tolist(), best.values[row].tolist(), strict=True
                        )
                    ],
                }
        here = {i: self._breakers[i] for i in sorted(set(ids)) if i in self._breakers}
        return {
            "prompt": prompt,
            "more": list(more),
            "ids": ids,
            "start": len(start),
            "tokens": tokens,
            "breakers": {str(i): [list(t) for t in tails] for i, tails in here.items()},
        }

    def _cut(
        self, prompt: str, more: Sequence[int], chat: bool, at: int, token: int
    ) -> tuple[str, list[int]]:
        """End a sequence before position `at` and go on with `token`, as prompt and more."""
        start = self.model.encode(prompt, chat=chat)
        ids = self.model.encode([*start, *more])
        if not 1 <= at <= len(ids):
            raise BadInput(f"the position is {at}; expected 1 to {len(ids)}")
        if at >= len(start):
            return prompt, [*more[: at - len(start)], token]
        # the longest text that is read as these very ids; what is behind it stays ids
        for end in range(at, 0, -1):
            text = self.model.decode(ids[:end])
            if text and not chat and self.model.encode(text) == ids[:end]:
                return text, [*ids[end:at], token]
        raise BadInput("no text encodes to exactly these tokens; continue from a later position")

    def lens(self, ids: Sequence[int], token: int | None, progress: Progress) -> dict[str, Any]:
        """Tell what the head would say after every block, at the last `POSITIONS` positions."""
        from lmhead.inspect.lens import lens

        found = lens(list(ids), self.model, token=token, top=5, last=POSITIONS, progress=progress)
        return found.to_dict()

    def why(
        self,
        ids: Sequence[int],
        token: int | None,
        against: int | None,
        heads: bool,
        progress: Progress,
    ) -> dict[str, Any]:
        """Tell which parts pushed the logit of a token, or of one against another."""
        from lmhead.inspect.attribution import why

        found = why(
            list(ids), self.model, token=token, against=against, heads=heads, progress=progress
        )
        return {**asdict(found), "total": found.total, "rounding": found.rounding}
