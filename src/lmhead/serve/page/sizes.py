"""The size of a model, part by part, and what fewer rows of the head would save and still say.

Symbols: V rows of the head, p probabilities `[V]`, mass `[V]` their sum over positions.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lmhead.body.adding import blocks_of
from lmhead.errors import BadInput, LMHeadError
from lmhead.loading import Model
from lmhead.progress import Progress
from lmhead.steer.prompts import NEUTRAL
from lmhead.trim.coverage import Observed
from lmhead.trim.folder import ModelFolder
from lmhead.trim.keepset import BLOCK, tail
from lmhead.trim.observing import observe_texts

_POSITIONS = 20_000  # tokens of a text that the model reads at most
_KINDS = (("attention", ("attn", "attention")), ("mlp", ("mlp", "ffn", "feed_forward", "moe")))


def size(model: Model) -> dict[str, Any]:
    """Tell the parameters and bytes of every part: head, embedding, blocks, final norm."""
    net = model.body.model
    head = net.get_output_embeddings()
    embedding = net.get_input_embeddings()
    try:
        prefix = _name_of(net, blocks_of(net)) + "."
    except LMHeadError:
        prefix = "\0"
    own = {id(p): "head" for p in head.parameters()} if head is not None else {}
    given = {id(p): "embedding" for p in embedding.parameters()}
    parts: dict[tuple[str, int | None], list[int]] = {}
    for name, p in net.named_parameters():
        if id(p) in own:
            key: tuple[str, int | None] = ("head and embedding" if id(p) in given else "head", None)
        elif id(p) in given:
            key = ("embedding", None)
        elif name.startswith(prefix):
            block, _, inner = name.removeprefix(prefix).partition(".")
            key = (_kind(inner), int(block))
        else:
            key = ("other", None)
        counted = parts.setdefault(key, [0, 0])
        counted[0] += p.numel()
        counted[1] += p.numel() * p.element_size()
    return {
        "parts": [
            {"name": name, "block": block, "parameters": n, "bytes": nbytes}
            for (name, block), (n, nbytes) in parts.items()
        ],
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        "rows": model.head.vocab_size,
        "row": {
            "parameters": _per_row(net, model.head.vocab_size)[0],
            "bytes": _per_row(net, model.head.vocab_size)[1],
        },
    }


def _per_row(net: Any, V: int) -> tuple[int, int]:
    """Return parameters and bytes that go with each row: of the head, and of the embedding."""
    own = {id(p): p for m in (net.get_output_embeddings(), net.get_input_embeddings()) if m
           for p in m.parameters() if p.shape[0] >= V}  # fmt: skip
    return (
        sum(p.numel() // p.shape[0] for p in own.values()),
        sum(p.numel() // p.shape[0] * p.element_size() for p in own.values()),
    )


def _name_of(net: Any, module: Any) -> str:
    return str(next(name for name, found in net.named_modules() if found is module))


def _kind(name: str) -> str:
    """Tell what a block's parameter is, by the name of its module: no name says norm."""
    for kind, words in _KINDS:
        if any(word in part for part in name.lower().split(".") for word in words):
            return kind
    return "norm" if "norm" in name.lower() or "ln" in name.lower() else "other"


def coverage(model: Model, text: str | None, progress: Progress) -> dict[str, Any]:
    """Tell which share of probability the most useful rows hold, for every number of rows.

    `text` is what the model reads, a paragraph after the other; plain sentences that
    come with lmhead without one. Rows come in whole blocks, and a token with all that it is made
    of, as a trim takes them.
    """
    texts = [t for t in (text or "").split("\n") if t.strip()] if text else list(NEUTRAL)
    if not texts:
        raise BadInput("the text is empty; expected a few paragraphs")
    encoded, left = [], _POSITIONS
    for one in texts:
        if left > 0:
            encoded.append(model.tokenizer(one)["input_ids"][:left])
            left -= len(encoded[-1])
    seen, _ = observe_texts(model, [ids for ids in encoded if ids], progress=progress)
    order, always, note = _order(model, seen)
    share = seen.mass[torch.tensor(order)].cumsum(0) / seen.mass.sum()
    least = -(-max(always, 1) // BLOCK) * BLOCK
    rows = [*range(least, len(order), BLOCK), len(order)]
    covered = seen.choices > 0
    chosen = torch.cumsum(covered[torch.tensor(order)].long(), 0)
    return {
        "positions": seen.positions,
        "always": always,
        "rows": rows,
        "share": [float(share[n - 1]) for n in rows],
        "chosen": [int(chosen[n - 1]) for n in rows],
        "choices": int(covered.sum()),
        "note": note,
    }


def _order(model: Model, seen: Observed) -> tuple[list[int], int, str | None]:
    """Return the ids in the order in which a trim would take them, and how many it always does."""
    mass = seen.mass.tolist()
    by_mass = sorted(range(len(mass)), key=lambda i: (-mass[i], i))
    if model.folder is None:
        return by_mass, 0, "the model is not from a folder: what a token is made of is left out"
    try:
        folder = ModelFolder.open(model.folder)
        tokenizer = folder.tokenizer
        last, _ = tail(tokenizer, folder.rows)
        base = tokenizer.closure(folder.required_ids() | last)
    except LMHeadError as error:
        return by_mass, 0, f"this model cannot be trimmed: {error}"
    taken = dict.fromkeys(i for i in sorted(base) if i < len(mass))
    always = len(taken)
    for token in by_mass:
        if token not in taken and token in tokenizer.names:
            taken.update(dict.fromkeys(_below(tokenizer.tree(token), len(mass))))
    return list(taken), always, None


def _below(ids: set[int], V: int) -> Sequence[int]:
    return sorted(i for i in ids if i < V)
