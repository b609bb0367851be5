"""Under torchrun: `torchrun --nproc-per-node 4 -m lmhead next ...`, the head over all ranks.

Every rank runs the whole command, body and sampling included, with the rows of its own of the head.
The first rank prints. The others say nothing, unless a rank is lost: then all that are left tell.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput, LostRank

if TYPE_CHECKING:
    from lmhead.head import Head
    from lmhead.loading import Model
    from lmhead.sampling import SamplingParams

COMMANDS = ("next", "generate", "score")
_launched = False


def is_launched() -> bool:
    """Tell whether torchrun, or what sets the same variables, started several of us."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and os.environ["WORLD_SIZE"] != "1"


@contextmanager
def together(words: list[str]) -> Iterator[None]:
    """Be one rank of several, from the first check of the command line to the end."""
    global _launched
    rank = int(os.environ["RANK"])
    out, err = sys.stdout, sys.stderr
    if rank:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        name = next((word for word in words if not word.startswith("-")), None)
        asks = {"-h", "--help", "-V", "--version"} & {*words}
        if name not in COMMANDS and not asks:
            raise BadInput(
                f"torchrun started {os.environ['WORLD_SIZE']} ranks of `lmhead {name or ''}`, "
                f"which runs on one; expected one of {', '.join(COMMANDS)}: leave out torchrun"
            )
        if "-" in words:
            raise BadInput("ranks cannot share stdin (-); give the text, or a file")
        _launched = not asks
        yield
        if _launched:
            _end()
    except LostRank as error:
        if rank:
            print(f"error: rank {rank}: {error}", file=err, flush=True)
        raise
    finally:
        _launched = False
        sys.stdout, sys.stderr = (sys.stdout, sys.stderr) if rank else (out, err)


def group() -> Any:
    """Return the process group of all ranks; None where this is the only one."""
    if not _launched:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.group.WORLD


def prepared(
    model: str, device: str | None, dtype: str | None, body: str | None = None
) -> "tuple[Model, Head | None]":
    """Load a model, and share its head with the other ranks where there are any."""
    from lmhead.cli import render
    from lmhead.generation.engines import engine
    from lmhead.loading import load

    loaded = load(model, body=body, device=device, dtype=dtype, progress=render.progress)
    shared = group()
    return loaded, None if shared is None else engine(loaded, "dense", group=shared)


def seeded(params: "SamplingParams") -> "SamplingParams":
    """Let all ranks draw alike where no seed was given."""
    shared = group()
    if shared is None or params.seed is not None:
        return params
    from secrets import randbelow

    from lmhead.ranks import ranks_of

    return replace(params, seed=ranks_of(shared).agree(randbelow(2**31), "agreeing on a seed"))


def _end() -> None:
    """Leave together: whoever leaves early takes the store with it."""
    import torch.distributed as dist

    if dist.is_initialized():
        from lmhead.ranks import ranks_of

        ranks_of(dist.group.WORLD).end()
