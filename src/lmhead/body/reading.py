"""Reading texts once: their last states at every layer, and how likely the model finds them.

Symbols: R rows of W nodes, each a piece of the tree of all texts; B texts in them, L blocks, d the
width of a state, F figures.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.body.likelihood import figures_of_tokens, summed_up
from lmhead.body.sharing import Row, batches_of, inputs_of, rows_of
from lmhead.errors import UnsupportedModel
from lmhead.head import LMHead

# The ids of a text, and how many of them are its prompt: at least 1, for token 0 is never predicted
Encoded = tuple[list[int], int]

_ROUNDING = 5e-5  # of the length of a state: ten times what was seen
_TRIED = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 9]]  # texts that begin alike, and one that does not


@torch.no_grad()
def read_once(
    blocks: Blocks, head: LMHead, encoded: Sequence[Encoded]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Read different texts, some at a time; yield which, `[B, L + 1, d]` and figures `[B, F]`.

    What several begin with is read once, where the model lets itself be told what a token sees.
    """
    for rows in _plan(blocks, [ids for ids, _ in encoded]):
        found = _states(blocks, rows)
        W = found[-1].shape[1]
        which = [i for row in rows for i in row.texts]
        # of each text, its places among the R W nodes
        paths = [[b * W + t for t in path] for b, row in enumerate(rows) for path in row.paths]
        ends = torch.tensor([path[-1] for path in paths])
        last = torch.stack([x.flatten(0, 1)[ends.to(x.device)].float().cpu() for x in found], 1)
        h = found[-1].flatten(0, 1)
        yield which, last, _likelihood(head, h, [encoded[i] for i in which], paths)


def _plan(blocks: Blocks, texts: Sequence[list[int]]) -> Iterator[list[Row]]:
    """Return the rows that run together. Texts that some layer would cut are read each alone."""
    far = _window(blocks)
    short = [i for i, ids in enumerate(texts) if len(ids) <= far]
    if len(short) < 2 or not _reads_trees(blocks):
        short = []
    alone = sorted(set(range(len(texts))) - set(short))
    yield from batches_of(rows_of(texts, short))
    yield from batches_of([row for i in alone for row in rows_of(texts, [i])])


def _states(blocks: Blocks, rows: Sequence[Row]) -> list[Tensor]:
    """Run rows; return what every block puts out, and what enters the head, each `[R, W, d]`."""
    ids, others = inputs_of(rows, blocks.body.model.dtype)
    found = blocks.states(ids, **{name: x.to(blocks.body.device) for name, x in others.items()})
    for at, x in enumerate(found):
        if not isinstance(x, Tensor) or x.shape[:2] != ids.shape or x.ndim != 3:
            got = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UnsupportedModel(
                f"block {at} of this model puts out {got}; expected one state for each token, "
                f"[{ids.shape[0]}, {ids.shape[1]}, d]"
            )
    return found


def _window(blocks: Blocks) -> float:
    """Return how far every layer of a model sees: within it, none of them cuts a text."""
    config = blocks.body.config
    kinds = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((int(n) for n in kinds if isinstance(n, int) and n > 0), default=float("inf"))


def _reads_trees(blocks: Blocks) -> bool:
    """Try: does the model read texts in one row as it reads each of them alone?

    In half precision, rounding alone may move a state by half of its length, so that a trial would
    tell nothing: such models read every text alone.
    """
    if blocks.body.model.dtype not in (torch.float32, torch.float64):
        return False
    V = blocks.body.vocab_size
    texts = [[token % V for token in ids] for ids in _TRIED]
    alone = _states(blocks, [row for i in range(len(texts)) for row in rows_of(texts, [i])])[-1]
    [row] = rows_of(texts, range(len(texts)))
    try:
        h = _states(blocks, [row])[-1][0]
    except Exception:  # however it says that it takes no such mask
        return False
    for i, path in zip(row.texts, row.paths, strict=True):
        expected = alone[i, : len(path)]
        off = (h[path] - expected).norm(dim=-1)
        if not bool((off <= _ROUNDING * expected.norm(dim=-1)).all()):
            return False
    return True


def _likelihood(
    head: LMHead, h: Tensor, encoded: Sequence[Encoded], paths: Sequence[list[int]]
) -> Tensor:
    """Return the figures of each text, from h `[n, d]` and the places of the text's tokens in it.

    A token that several texts have is scored once.
    """
    scored = [
        [(path[t - 1], ids[t]) for t in range(first, len(ids))]  # the place, and what it predicts
        for (ids, first), path in zip(encoded, paths, strict=True)
    ]
    different = sorted({pair for pairs in scored for pair in pairs})
    places = sorted({place for place, _ in different})
    row = {place: k for k, place in enumerate(places)}
    each = figures_of_tokens(
        head,
        h[torch.tensor(places, dtype=torch.long, device=h.device)],
        torch.tensor([row[place] for place, _ in different], dtype=torch.long),
        torch.tensor([token for _, token in different], dtype=torch.long),
    )
    index = {pair: k for k, pair in enumerate(different)}
    return summed_up([each[[index[pair] for pair in pairs]] for pairs in scored])
