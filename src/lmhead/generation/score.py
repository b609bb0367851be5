"""How probable a text is: the log-probability of every token, in natural logarithms.

A token's log-probability is given what stands before it, so the first token of a text has none,
unless something stands before it: a prompt, or the token that the tokenizer itself puts at the
beginning (BOS). Rows of the head that no token belongs to take no part, as in generation.

Symbols: B rows, T the longest of them, h `[B, T, d]` what enters the head, V vocabulary rows. All
logits `[B, T, V]` are never held: the head answers for a few hundred positions at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.generation.prompts import (
    Prompt,
    Prompts,
    Source,
    check_head,
    check_prompt_ids,
    listed,
)
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.models.conversation import wrapped
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

LOGITS_AT_ONCE = 1 << 24  # 64 MB of float32
TOKENS_AT_ONCE = 1 << 14  # of all rows that the body reads together
WINDOW = 8  # batches whose texts are sorted by length, so that little is padded


@dataclass(frozen=True)
class TextScore:
    """How probable a text is, given the prompt before it, if any."""

    text: str
    prompt: str | None
    ids: tuple[int, ...]  # of the text alone
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]  # one for each id; None: nothing stands before it
    logprob: float  # their sum
    scored: int  # how many have one
    perplexity: float | None  # exp(-logprob / scored); None: there is nothing to tell

    def to_dict(self, *, tokens: bool = True) -> dict[str, Any]:
        """Return the JSON object, with or without the figures of every token."""
        result = asdict(self)
        if not tokens:
            for name in ("ids", "tokens", "logprobs"):
                del result[name]
        return result


def perplexity(scores: Iterable[TextScore]) -> float | None:
    """Return the perplexity of all texts together, every token counting alike."""
    totals = [(s.logprob, s.scored) for s in scores]
    scored = sum(n for _, n in totals)
    return _perplexity(sum(total for total, _ in totals), scored)


def score_text(
    texts: Prompts,
    model: Source = DEFAULT_MODEL,
    *,
    prompt: Prompts | None = None,
    chat: bool = False,
    stride: int | None = None,
    batch_size: int = 8,
    head: Head | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    body: str | None = None,
    progress: Progress = silent,
) -> list[TextScore]:
    """Return the log-probability of every token of each text, their sum and the perplexity.

    - `texts`: a text, the ids of one, or a list of either.
    - `prompt`: what precedes every text, or a list with one for each; it is not scored. Prompt and
      text are encoded together: a token that spans both belongs to the text.
    - `chat`: wrap the prompt in the model's chat template; the text is the answer.
    - `stride`: read a text that is longer than the model's context in windows, each `stride` tokens
      further on; every token is scored once, with at least context - stride tokens before it.
      Without it such a text is an error.
    - `head`: an engine to use instead of the model's own head.
    - `tokenizer`, `device`, `dtype`, `body`: as in `load`.

    The first token has no log-probability unless it follows a prompt or a token that the tokenizer
    adds at the beginning.
    """
    given = listed(texts)
    check_head(head)
    check_scoring(chat=chat, prompted=prompt is not None, stride=stride, batch_size=batch_size)
    prompts: Sequence[Prompt | None] = [None] * len(given)
    if prompt is not None:
        prompts = listed(prompt)
        if len(prompts) == 1:
            prompts = [prompts[0]] * len(given)
        if len(prompts) != len(given):
            raise BadInput(
                f"there are {len(prompts)} prompts and {len(given)} texts; expected one prompt, "
                "or one for each text"
            )
    loaded = load(
        model, tokenizer=tokenizer, device=device, dtype=dtype, body=body, progress=progress
    )
    pairs = list(zip(prompts, given, strict=True))
    with progress("scoring", total=len(pairs)) as advance:
        results = []
        for result in scores(
            pairs, loaded, chat=chat, stride=stride, batch_size=batch_size, head=head
        ):
            results.append(result)
            advance(1)
    return results


def check_scoring(*, chat: bool, prompted: bool, stride: int | None, batch_size: int) -> None:
    """Say what is wrong with the options, before a model is loaded."""
    if chat and not prompted:
        raise BadInput("chat wraps the prompt, but there is none; give a prompt", names=["chat"])
    for name, value in (("stride", stride), ("batch_size", batch_size)):
        if value is None and name == "stride":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(
                f"{name} is {value!r}; expected a whole number of at least 1", names=[name]
            )


def scores(
    pairs: Iterable[tuple[Prompt | None, Prompt]],
    model: Model,
    *,
    chat: bool = False,
    stride: int | None = None,
    batch_size: int = 8,
    head: Head | None = None,
    error: float = 0.0,
) -> Iterator[TextScore]:
    """Score pairs of a prompt (or None) and a text as they come, in their order.

    `error` is how far off a log-probability may be where that spares the head to read all rows.
    """
    source = iter(pairs)
    token_text = cache(model.token_text)
    while window := list(islice(source, WINDOW * batch_size)):
        items = [_Item.of(model, prompt, text, chat) for prompt, text in window]
        rows = [row for item in items for row in item.rows(model, stride)]
        rows.sort(key=lambda row: -len(row.ids))
        for batch in _batches(rows, batch_size):
            _score(model, head or model.head, batch, error)
        for item in items:
            yield item.result(token_text)


class _Item:
    """A text on its way: the ids before it, its own, and what is known of them."""

    def __init__(self, prompt: str | None, text: str, before: list[int], ids: list[int]) -> None:
        self.prompt, self.text, self.before, self.ids = prompt, text, before, ids
        self.logprobs: list[float | None] = [None] * len(ids)

    @classmethod
    def of(cls, model: Model, prompt: Prompt | None, text: Prompt, chat: bool) -> "_Item":
        if text == "":
            raise BadInput("a text is empty; expected some text")
        if chat and prompt is None:
            raise BadInput("chat wraps the prompt, but a text has none", names=["chat"])
        if isinstance(text, str) and (prompt is None or isinstance(prompt, str)):
            return cls(prompt, text, *_encoded(model, prompt, text, chat))
        if chat:
            raise BadInput("chat wraps texts, but got ids; expected texts")
        said, before = (None, []) if prompt is None else _read(model, prompt)
        if isinstance(text, str):
            return cls(said, text, before, _encoded(model, None, text, chat)[1])
        shown, ids = _read(model, text)
        return cls(said, shown, before, ids)

    def rows(self, model: Model, stride: int | None) -> Iterator["_Row"]:
        """Cut the text into the windows that the model can read."""
        ids, context = [*self.before, *self.ids], model.body.context
        end = max(len(self.before), 1)  # up to here nothing is left to score
        if context is None or len(ids) <= context:
            yield _Row(self, ids, 0, end)
            return
        if stride is None:
            raise BadInput(
                f"a text has {len(ids):,} tokens with its prompt, but {model.name} "
                f"reads at most {context:,}; shorten it, or give a stride to read it in windows",
                names=["stride"],
            )
        if stride >= context:
            raise BadInput(
                f"stride is {stride}; expected less than the {context:,} tokens that {model.name} "
                "reads",
                names=["stride"],
            )
        start = 0
        while True:
            stop = min(start + context, len(ids))
            if stop > end:
                yield _Row(self, ids[start:stop], start, end - start)
                end = stop
            if stop == len(ids):
                return
            start = min(start + stride, len(ids) - context)

    def result(self, token_text: Callable[[int], str]) -> TextScore:
        """Return what is known now."""
        known = [value for value in self.logprobs if value is not None]
        total = math.fsum(known)
        return TextScore(
            self.text,
            self.prompt,
            tuple(self.ids),
            tuple(map(token_text, self.ids)),
            tuple(self.logprobs),
            total,
            len(known),
            _perplexity(total, len(known)),
        )


@dataclass(frozen=True)
class _Row:
    """What the body reads at once of one text."""

    item: _Item
    ids: list[int]
    start: int  # the place of ids[0] among the ids of prompt and text
    first: int  # the first of `ids` to score; it stands behind another


def _batches(rows: Sequence[_Row], batch_size: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    for row in rows:  # the longest first
        if batch and (len(batch) + 1) * len(batch[0].ids) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(row)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.inference_mode()
def _score(model: Model, head: Head, rows: Sequence[_Row], error: float) -> None:
    """Run the body once for all rows, padded behind: what comes later changes nothing before it."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
    h, _ = model.body(ids, use_cache=False)  # [B, T, d]
    places = [(i, t) for i, row in enumerate(rows) for t in range(row.first, len(row.ids))]
    if not places:
        return
    at = torch.tensor(places)  # [n, 2]: row, and the place of the id that is scored
    targets = ids[at[:, 0], at[:, 1]]  # [n]
    entering = h[at[:, 0].to(h.device), at[:, 1].to(h.device) - 1]  # [n, d]
    found = iter(_logprobs(head, entering, targets, model.reachable, error).tolist())
    for i, t in places:
        item = rows[i].item
        item.logprobs[rows[i].start + t - len(item.before)] = next(found)


def _logprobs(head: Head, h: Tensor, targets: Tensor, V: int, error: float) -> Tensor:
    """Give the log-probabilities `[n]` of targets `[n]` for h `[n, d]`, a chunk at a time."""
    if error and not head.reads_all:
        return head.logprobs(h, targets.unsqueeze(-1), error=error, limit=V).squeeze(-1)
    if not head.reads_all and head.vocab_size == V:  # it has something better to do
        return -head.loss(h, targets.to(h.device), reduction="none").float().cpu()
    size = max(1, LOGITS_AT_ONCE // V)
    parts = []
    for start in range(0, len(targets), size):
        z = head(h[start : start + size])[..., :V].float()  # [size, V]
        wanted = targets[start : start + size].to(z.device)
        own = z.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        parts.append((own - z.logsumexp(-1)).cpu())
    return torch.cat(parts)


def split(model: Model, prompt: str | None, text: str) -> tuple[list[int], list[int]]:
    """Give the ids before a text (BOS, prompt) and its own, encoded together."""
    return _encoded(model, prompt, text, chat=False)


def _encoded(
    model: Model, prompt: str | None, text: str, chat: bool
) -> tuple[list[int], list[int]]:
    """Give the ids before a text (BOS, prompt) and its own, encoded together and split."""
    said = prompt or ""
    if chat:
        said = _templated(model, said)
    whole = _bare(model, said + text)
    given = whole if chat else model.tokenizer(said + text, verbose=False)["input_ids"]
    # what the tokenizer puts at the beginning; the end of a text is not a part of it
    n = len(whole)
    places = (k for k in range(len(given) - n + 1) if given[k : k + n] == whole)
    bos = given[: next(places, 0)]
    shared = 0
    for mine, both in zip(_bare(model, said) if said else (), whole, strict=False):
        if mine != both:
            break
        shared += 1
    if shared == n:
        raise BadInput(f"the text {text[:40]!r} adds no token to its prompt; expected some text")
    model.check_ids([min(whole), max(whole)])
    return [*bos, *whole[:shared]], whole[shared:]


def _bare(model: Model, text: str) -> list[int]:
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


def _templated(model: Model, prompt: str) -> str:
    return wrapped(model.tokenizer, [{"role": "user", "content": prompt}], model.name)


def _read(model: Model, prompt: Prompt) -> tuple[str, list[int]]:
    """Give the text and the ids of a prompt that is read alone."""
    if isinstance(prompt, str):
        before, ids = _encoded(model, None, prompt, chat=False)
        return prompt, [*before, *ids]
    ids = check_prompt_ids(model, prompt)
    return model.decode(ids), ids


def _perplexity(total: float, scored: int) -> float | None:
    return math.exp(-total / scored) if scored else None
