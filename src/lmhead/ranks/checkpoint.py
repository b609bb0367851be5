"""Checkpoints that N ranks write and M ranks read, by torch.distributed.checkpoint.

The folder is whole or not there: all ranks write beside it, and the first gives it its place once
every one is done. While the ranks work together they look out for each other, so that a lost one
ends in an error that names it and not in a wait.
"""

import json
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.files.whole import folder_whole
from lmhead.ranks.group import Group, Ranks, ranks_of


def save_checkpoint(
    state: dict[str, Any], folder: str | Path, group: Group = None, *, force: bool = False
) -> None:
    """Write a state (tensors, DTensors, what `sharded_rows` gives) to a folder all ranks can see.

    Every rank calls it, with its own parts. `force` replaces a folder that was written so before.
    """
    ranks = ranks_of(group)
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with ExitStack() as stack:
        answer: dict[str, Any] = {}
        if ranks.rank == 0:
            try:
                answer["folder"] = str(stack.enter_context(folder_whole(Path(folder), force=force)))
            except LMHeadError as error:
                answer = {"error": str(error)}
        answer = _from_first(answer, ranks)
        if "error" in answer:
            raise BadInput(answer["error"])

        def write() -> None:
            save(
                state,
                storage_writer=FileSystemWriter(answer["folder"]),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )

        _together(write, ranks, "saving a checkpoint", LMHeadError)
        ranks.meet("saving a checkpoint")
    ranks.meet("saving a checkpoint")  # now it is there


def load_checkpoint(state: dict[str, Any], folder: str | Path, group: Group = None) -> None:
    """Fill a state from a folder of `save_checkpoint`, in place; each rank reads what it needs.

    Values that are not tensors may be numbers, texts, lists and dictionaries: no code from them
    runs.
    """
    ranks = ranks_of(group)
    from torch.distributed.checkpoint.state_dict_loader import load

    from lmhead.ranks.unpickling import METADATA, Planner, Reader

    if not (Path(folder) / METADATA).is_file():
        raise BadCheckpoint(f"{folder} holds no checkpoint; expected what save_checkpoint writes")

    def read() -> None:
        reader = Reader(Path(folder))
        reader.read_metadata()  # what is wrong with it is raised here: torch prints it, and goes on
        load(
            state,
            storage_reader=reader,
            planner=Planner(),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )

    _together(read, ranks, "loading a checkpoint", BadCheckpoint)


def sharded_rows(rows: Tensor, counts: Sequence[int], ranks: Ranks) -> Any:
    """Give rows of one tensor, `counts[r]` of them on rank r, as a checkpoint can hold them."""
    if ranks.size == 1:
        return rows
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard

    rest = list(rows.shape[1:])
    starts = accumulate(counts, initial=0)
    about = [
        ShardMetadata([start, *([0] * len(rest))], [n, *rest], f"rank:{rank}/{rows.device}")
        for start, n, rank in zip(starts, counts, ranks.members, strict=False)
    ]
    whole = ShardedTensorMetadata(
        about,
        torch.Size([sum(counts), *rest]),
        TensorProperties(dtype=rows.dtype, layout=rows.layout, requires_grad=False),
    )
    # all ranks know all of it already, so that nothing has to be exchanged
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(rows, about[ranks.rank])], whole, process_group=ranks.group
    )


def _from_first(answer: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Give what the first rank says to all."""
    if ranks.size == 1:
        return answer
    mine = torch.tensor(list(json.dumps(answer).encode()), dtype=torch.uint8)
    (sizes,) = ranks.gather(torch.tensor(len(mine)), what="saving a checkpoint")
    room = mine if ranks.rank == 0 else mine.new_empty(int(sizes[0]))
    said: dict[str, Any] = json.loads(bytes(ranks.from_rank(0, room, "saving a checkpoint")))
    return said


def _together(task: Callable[[], None], ranks: Ranks, what: str, kind: type[LMHeadError]) -> None:
    """Run what torch does with all ranks in a thread, and look out for lost ones meanwhile."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                if ranks.size == 1:  # torch warns that it works for one process, which is meant
                    warnings.simplefilter("ignore", UserWarning)
                task()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def is_done(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    ranks.wait_for(is_done, what)
    if failed:
        ranks.look_around(what)  # a rank that is gone is the better explanation
        reason = (str(failed[0]).strip().splitlines() or [type(failed[0]).__name__])[-1]
        raise kind(f"{what} failed ({reason}); see the other ranks' errors") from failed[0]
