"""Which question to ask a head: all logits, the best tokens only, or a draw.

Most filters look at the best tokens alone, or change the logits of a few ids that are known
beforehand (the ones they touch). Then a head need not give all V logits, and one that has something
better to do (`reads_all` is false) is not asked for them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.head import Edit, Head
from lmhead.sampling import Candidates, Logprobs, Sampler, SequenceState
from lmhead.sampling.params import GREEDY_BELOW

_CUTS = ("top_k", "top_p", "min_p")
_DRAWN = ("top_n_sigma", "top_p", "min_p")  # what `head.sample` cuts without top_k, in its order


def next_ids(
    head: Head, h: Tensor, sampler: Sampler, states: Sequence[SequenceState]
) -> tuple[list[int], tuple[Logprobs, ...] | None]:
    """Draw one id per row of h `[B, d]`, by the verb of the head that fits the sampler."""
    logits: Tensor | Candidates | None = None
    if not head.reads_all and sampler.params.logprobs is None:
        if _draws_from_all(sampler):
            return _draw(head, h, sampler, states), None
        k = _best_needed(sampler)
        logits = None if k is None else _candidates(head, h, k, sampler, states)
    if logits is None:
        logits = head(h)
    drawn = sampler.step(logits, states)
    return drawn.ids.tolist(), drawn.logprobs


def _best_needed(sampler: Sampler) -> int | None:
    """Tell how many of the best tokens are enough, besides the touched ones; None: all."""
    p, order = sampler.params, sampler.order
    cuts = [f.name for f in sampler.filters if f.touches is None and f.name != "temperature"]
    if set(cuts) - {*_CUTS} or p.dynatemp_range:
        return None
    # what is cut first must not have been touched later
    first = min(map(order.index, cuts), default=len(order))
    if any(f.touches for f in sampler.filters[first:]):
        return None
    if p.temperature < GREEDY_BELOW:
        return 1
    # top_p and min_p measure shares of what is left: they must come after the cut to k
    return p.top_k if cuts[:1] == ["top_k"] and not p.keep_ties else None


def _candidates(
    head: Head, h: Tensor, k: int, sampler: Sampler, states: Sequence[SequenceState]
) -> Candidates | None:
    """Ask for the k best tokens, and the touched ones where there are any."""
    V = sampler.vocab_size or head.vocab_size
    touches = any(f.touches for f in sampler.filters)
    touched = [sampler.touched(s, V) for s in states] if touches else None
    best = head.candidates(h, k, touched, limit=V)
    if not bool((best.logits.amax(-1) < torch.inf).all()):  # NaN: let all logits tell
        return None
    return Candidates.of(best.ids, best.logits, V)


def _draws_from_all(sampler: Sampler) -> bool:
    """Tell whether the head itself can draw by the sampler's law.

    That is touching filters first, then a temperature, then top_n_sigma, top_p and min_p in this
    order, each of them or not.
    """
    p = sampler.params
    if p.temperature < GREEDY_BELOW or p.dynatemp_range or p.keep_ties:
        return False
    rest = [f.name for f in sampler.filters if not f.touches]
    first = next((n for n, f in enumerate(sampler.filters) if not f.touches), None)
    if first is not None and any(f.touches for f in sampler.filters[first:]):
        return False
    if rest[:1] == ["temperature"]:
        rest = rest[1:]
    return rest == [name for name in _DRAWN if name in rest]


def _draw(head: Head, h: Tensor, sampler: Sampler, states: Sequence[SequenceState]) -> list[int]:
    """Draw from the softmax of all logits, or of what is cut out of it, each with its generator."""
    p = sampler.params
    V = sampler.vocab_size or head.vocab_size
    touching = [f for f in sampler.filters if f.touches]

    def edit(seq: SequenceState) -> Edit:
        ids = sampler.touched(seq, V)

        def change(y: Tensor) -> Tensor:
            c = Candidates(y.float().unsqueeze(0), ids.unsqueeze(0), V)
            for f in touching:
                c = f.apply(c, [seq])
            return c.z[0]

        return Edit(ids, change)

    edits = [edit(s) for s in states] if touching else None
    generators = [s.generator for s in states]
    drawn: list[int] = head.sample(
        h,
        p.temperature,
        top_p=p.top_p if "top_p" in sampler.order else None,
        min_p=p.min_p if "min_p" in sampler.order else None,
        top_n_sigma=p.top_n_sigma if "top_n_sigma" in sampler.order else None,
        generator=generators,
        edits=edits,
        limit=V,
    ).tolist()
    for seq, token in zip(states, drawn, strict=True):
        seq.accept(token)
    return drawn
