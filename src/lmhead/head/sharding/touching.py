"""Tokens that are touched: their logits come from whichever rank has the row, and go back there.

Symbols: n states, z logits of the columns that are here, `[n, columns]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.head.answers import TopK, each, ranked
from lmhead.head.base import Head
from lmhead.head.edits import Edits, check_edit
from lmhead.head.sharding.joining import NOBODY
from lmhead.head.sharding.rows import Rows
from lmhead.ranks import Ranks

Places = Sequence[tuple[Tensor, Tensor]]  # for each state: rows of this rank, and which are its own


def edited(z: Tensor, edits: Edits, V: int, rows: Rows, ranks: Ranks) -> Tensor:
    """Do edits to this rank's logits; an edit may look at tokens whose rows are elsewhere."""
    z = (z if z.dtype == torch.float64 else z.float()).clone()
    changes = each(edits, len(z), "edits")
    for edit in changes:
        check_edit(edit, V)
    none = torch.empty(0, dtype=torch.int64, device=z.device)
    touched = [none if edit is None else edit.ids.to(z.device) for edit in changes]
    if not any(map(len, touched)):
        return z
    places = [rows.here(ids) for ids in touched]
    flat = torch.cat([_values(row, *place) for row, place in zip(z, places, strict=True)])
    plain = torch.split(ranks.sum_(flat, "scoring touched tokens"), list(map(len, touched)))
    for row, edit, y, (place, own) in zip(z, changes, plain, places, strict=True):
        if edit is not None and len(edit.ids):
            row[place[own]] = edit.apply(y.cpu()).to(row)[own]
    return z


def untouched(z: Tensor, width: int, places: Places, start: int) -> tuple[TopK, list[Tensor]]:
    """Give this rank's best `[n, width]` but for touched rows, and what the touched ones score.

    A touched row that fills up the best has the id NOBODY; the scores of touched ids are 0 where
    their row is elsewhere.
    """
    ids = torch.full((len(z), width), NOBODY, device=z.device)
    logits = z.new_full((len(z), width), -torch.inf)
    values = []
    for n, (row, (place, own)) in enumerate(zip(z, places, strict=True)):
        values.append(_values(row, place, own))
        if width:
            best = ranked(row.index_fill(0, place[own], -torch.inf), width)
            gone = torch.isin(best.ids, place[own])
            ids[n] = (best.ids + start).masked_fill(gone, NOBODY)
            logits[n] = best.logits
    return TopK(ids, logits), values


def untouched_screened(
    screen: Head, states: Tensor, width: int, places: Places, columns: int, start: int
) -> tuple[TopK, list[Tensor]]:
    """Give what `untouched` gives, from a screened head of this rank's rows."""
    mine = [place[own] for place, own in places]
    found = screen.candidates(states, width, mine, limit=columns)
    ids = torch.full((len(states), width), NOBODY)
    logits = found.logits.new_full((len(states), width), -torch.inf)
    values = []
    for n, (place, own) in enumerate(places):
        others = (found.ids[n] < columns) & ~torch.isin(found.ids[n], mine[n])
        at = others.nonzero().squeeze(1)[:width]
        ids[n, : len(at)] = found.ids[n][at] + start
        logits[n, : len(at)] = found.logits[n][at]
        value = found.logits.new_zeros(len(place))
        order = torch.searchsorted(*_sorted(found.ids[n], mine[n]))
        value[own] = found.logits[n][found.ids[n].argsort(stable=True)][order]
        values.append(value)
    return TopK(ids, logits), values


def _values(row: Tensor, place: Tensor, own: Tensor) -> Tensor:
    """Give the logits of places, 0 where they are no own ones."""
    value = row.new_zeros(len(place))
    value[own] = row[place[own]]
    return value


def _sorted(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    return ids.sort(stable=True).values, wanted
