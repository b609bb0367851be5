"""Reading a text as the model reads it: how much each token surprised it.

For every token: its log-probability given what stands before it, its rank among all tokens, and the
entropy there: whether the model was sure of something else, or of nothing. Logarithms are natural.

Symbols: T tokens, V vocabulary rows, h `[T, d]` what enters the head.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmhead import markup
from lmhead.errors import BadInput
from lmhead.generation.prompts import Prompt, Source, check_prompt_ids, listed
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

LOGITS_AT_ONCE = 1 << 23
SURE = 12.0  # nats: as improbable as colours can tell


@dataclass(frozen=True)
class Guess:
    """A token that the model would have said instead."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class ReadToken:
    """A token of a text, and what the model made of it."""

    id: int
    text: str
    logprob: float | None  # None: nothing stands before it
    rank: int | None  # 1: it was the most probable one
    entropy: float | None  # of what the model expected here, in nats
    guesses: tuple[Guess, ...] = ()  # what it held most probable


@dataclass(frozen=True)
class Reading:
    """A text as the model reads it: log-probability, rank and entropy of every token."""

    model: str
    text: str
    tokens: tuple[ReadToken, ...]
    logprob: float  # the sum
    perplexity: float | None  # None: there is no token to tell of

    def surprises(self) -> list[int]:
        """Return the positions of the tokens, the least probable first."""
        scored = [i for i, token in enumerate(self.tokens) if token.logprob is not None]
        return sorted(scored, key=lambda i: self.tokens[i].logprob or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)

    def _repr_html_(self) -> str:
        return markup.spans(map(_cell, self.tokens))

    def to_html(self) -> str:
        """Return a whole page that works offline: the text in colours, the numbers on hover."""
        scored = sum(token.logprob is not None for token in self.tokens)
        line = f"<p>{scored:,} tokens"
        if self.perplexity is not None:
            line += f", perplexity {self.perplexity:.4g}, log-probability {self.logprob:.2f}"
        line += ". The redder a token, the less the model expected it.</p>"
        rows: list[list[str | markup.Cell]] = []
        for i in self.surprises()[:25]:
            token = self.tokens[i]
            before = "".join(t.text for t in self.tokens[max(0, i - 8) : i])
            best = token.guesses[0] if token.guesses else None
            rows.append(
                [
                    f"...{before}",
                    _cell(token),
                    f"{token.logprob:.2f}",
                    f"{token.rank:,}",
                    "" if best is None else f"{best.text} {100 * best.probability:.0f} %",
                ]
            )
        head = ["after", "token", "log-probability", "rank", "expected"]
        body = line + self._repr_html_() + markup.table(head, rows, caption="surprises")
        return markup.page(f"read by {self.model}", body)


def read(
    text: Prompt,
    model: Source = DEFAULT_MODEL,
    *,
    top: int = 5,
    stride: int | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    body: str | None = None,
    progress: Progress = silent,
) -> Reading:
    """Read a text (or its ids): every token's log-probability, rank and entropy.

    - `top`: how many of the tokens that the model expected to report; 0 for none.
    - `stride`: read a text beyond the model's context in windows, each `stride` tokens further on;
      every token is read once, with at least context - stride tokens before it.
    - `tokenizer`, `device`, `dtype`, `body`: as in `load`.

    The first token has no numbers unless the tokenizer adds one before it. Rows of the head without
    a token are ignored.
    """
    for name, value, least in (("top", top, 0), ("stride", 1 if stride is None else stride, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadInput(
                f"{name} is {value!r}; expected a whole number of at least {least}", names=[name]
            )
    given = listed(text)
    if len(given) != 1:
        raise BadInput(f"read got {len(given)} texts; expected one")
    loaded = load(
        model, tokenizer=tokenizer, device=device, dtype=dtype, body=body, progress=progress
    )
    said, ids, own = _encoded(loaded, given[0])
    windows = list(_windows(loaded, len(ids), stride))
    token_text = cache(loaded.token_text)
    found: list[ReadToken] = [ReadToken(i, token_text(i), None, None, None) for i in ids[:1]]
    with progress("reading", total=len(ids)) as advance:
        for start, first, stop in windows:
            found += _read(loaded, ids[start:stop], first - start, top, token_text)
            advance(stop - first)
    found = found[len(ids) - own :]
    known = [token.logprob for token in found if token.logprob is not None]
    total = math.fsum(known)
    return Reading(
        model=loaded.name,
        text=said,
        tokens=tuple(found),
        logprob=total,
        perplexity=math.exp(-total / len(known)) if known else None,
    )


def _encoded(model: Model, given: Prompt) -> tuple[str, list[int], int]:
    """Return a text, its ids with what the tokenizer puts before them, and how many are its own."""
    if not isinstance(given, str):
        ids = check_prompt_ids(model, given)
        return model.decode(ids), ids, len(ids)
    if not given:
        raise BadInput("the text is empty; expected some text")
    bare = list(model.tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"])
    ids = list(model.tokenizer(given, verbose=False)["input_ids"])
    n = len(bare)
    at = next((k for k in range(len(ids) - n + 1) if ids[k : k + n] == bare), 0)
    if not bare:
        raise BadInput("the text holds no token; expected text that the tokenizer knows")
    model.check_ids([min(bare), max(bare)])
    return given, ids[: at + n], n  # the token that ends a text is not a part of it


def _windows(model: Model, T: int, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (start, the first to tell of, stop) of every window."""
    context = model.body.context
    if context is None or context >= T:
        yield 0, 1, T
        return
    if stride is None or stride >= context:
        got = "no stride is given" if stride is None else f"stride is {stride}"
        raise BadInput(
            f"the text has {T:,} tokens, but {model.name} reads at most {context:,}, and {got}; "
            "shorten it, or give a stride below that to read it in windows",
            names=["stride"],
        )
    start, first = 0, 1
    while first < T:
        stop = min(start + context, T)
        yield start, first, stop
        first = stop
        start = min(start + stride, T - context)


@torch.inference_mode()
def _read(
    model: Model, ids: list[int], first: int, top: int, token_text: Any
) -> Iterator[ReadToken]:
    """Tell of ids `[T]` from the place `first` on, which is at least 1."""
    h, _ = model.body(torch.tensor([ids]), use_cache=False)
    h = h[0, first - 1 : -1]  # [n, d]
    targets = torch.tensor(ids[first:], device=h.device)  # [n]
    V = model.reachable
    step = max(1, LOGITS_AT_ONCE // V)
    for at in range(0, len(targets), step):
        z = model.head(h[at : at + step])[..., :V].float()  # [step, V]
        yield from _read_tokens(z, targets[at : at + step], top, token_text)


def _read_tokens(z: Tensor, targets: Tensor, top: int, token_text: Any) -> Iterator[ReadToken]:
    lp = z.log_softmax(-1)
    own = lp.gather(-1, targets.unsqueeze(-1))
    rank = 1 + (lp > own).sum(-1)
    entropy = -(lp.exp() * lp).nan_to_num(0.0).sum(-1)
    best = torch.topk(lp, min(top, z.shape[-1])) if top else None
    numbers = zip(
        targets.tolist(), own[:, 0].tolist(), rank.tolist(), entropy.tolist(), strict=True
    )
    for n, (i, logprob, place, spread) in enumerate(numbers):
        guesses = []
        if best is not None:
            pairs = zip(best.indices[n].tolist(), best.values[n].exp().tolist(), strict=True)
            guesses = [Guess(j, token_text(j), p) for j, p in pairs]
        yield ReadToken(i, token_text(i), logprob, place, spread, tuple(guesses))


def surprise(token: ReadToken) -> float:
    """Return how much a token surprised: from 0 (certain, or nothing is known) to 1."""
    return 0.0 if token.logprob is None else min(1.0, -token.logprob / SURE)


def _cell(token: ReadToken) -> markup.Cell:
    if token.logprob is None:
        return markup.Cell(token.text, 0.0, "nothing stands before it")
    expected = ", ".join(f"{g.text!r} {100 * g.probability:.1f} %" for g in token.guesses)
    title = f"log-probability {token.logprob:.3f}, rank {token.rank:,}, entropy {token.entropy:.2f}"
    return markup.Cell(token.text, -surprise(token), f"{title}\nexpected: {expected}")
