"""Every question once, so that numba compiles its loops now and not at the first answer.

What is compiled depends on the dtypes alone, not on the sizes: numba keeps it on disk, and the next
process finds it there.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lmhead.head.edits import Edit
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.head.screened import ScreenedHead


def compile_loops(head: "ScreenedHead", progress: Progress) -> None:
    """Ask every kind of question of one state, on a copy of the counters."""
    h = torch.zeros(2, head.hidden_size)
    h[:, 0] = 1.0
    ids = torch.tensor([0])
    k = min(20, head.vocab_size)
    questions: list[Callable[[], object]] = [
        lambda: head.topk(h, 1),
        lambda: head.topk(h, k, edits=Edit.add({0: 1.0})),
        lambda: head.sample(h, top_k=k),
        lambda: head.sample(h),
        lambda: head.sample(h, edits=Edit.add({0: 1.0})),
        lambda: head.sample(h, top_p=0.9),
        lambda: head.logprobs(h, ids, error=0.1),
        lambda: head.score(h, torch.arange(k)),
    ]
    stats, head.stats = head.stats, type(head.stats)()
    try:
        with progress("compiling the loops", total=len(questions)) as advance:
            for ask in questions:
                ask()
                advance(1)
    finally:
        head.stats = stats
