"""Which engine answers for a model's head: by name, or the fastest one that is there."""

import sys
from collections.abc import Callable
from pathlib import Path

from lmhead.errors import BadInput
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.ranks import Group

ENGINES = ("auto", "dense", "screened", "max")


def _tell(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201


def engine(
    model: Model,
    name: str = "auto",
    *,
    keepset: Path | None = None,
    group: Group = None,
    progress: Progress = silent,
    note: Callable[[str], None] = _tell,
) -> Head:
    """Return an engine with the methods and the answers of `model.head`.

    - `auto`: the screened one if its int8 copy exists (`lmhead screen`), next to the model or in
      the cache, and its loops can be compiled; otherwise the dense one.
    - `screened`: its copy is made now if there is none.
    - `max`: Modular MAX (extra `max`); the same up to float rounding.
    - `group`: the torch.distributed ranks that share the head's rows and make the same calls; with
      `screened` each screens its own rows. A process group, a DeviceMesh, or (mesh, dimension).
    - `keepset`: only the rows of a keep-set file (`lmhead trim --form head`), in original ids.

    `note` is called with a message when a new copy has to be made; by default it writes to stderr.
    """
    check_engine(name)
    if not isinstance(model, Model):
        raise BadInput(
            f"the model is a {type(model).__name__}; expected the result of lmhead.load(...)"
        )
    if group is not None:
        if keepset is not None or name == "max":
            raise BadInput(
                "a keep-set and the engine 'max' run on one rank; leave out the group",
                names=["keepset", "engine"],
            )
        from lmhead.head.sharded import ShardedHead

        return ShardedHead.from_head(model.head, group, screened=name == "screened")
    if keepset is not None:
        if name not in ("auto", "dense"):
            raise BadInput(f"a keep-set has its own engine; leave out the engine {name!r}")
        from lmhead.head.trimmed import TrimmedHead

        return TrimmedHead.from_file(model.head, keepset)
    if name == "max":
        from lmhead.head.max_head import MaxHead

        return MaxHead.from_head(model.head, progress=progress)
    if name == "screened" or (name == "auto" and _screens(model)):
        from lmhead.head.screened import ScreenedHead
        from lmhead.head.screening.file import has_screen

        if not has_screen(model.folder, model.head.sha256):
            note(f"making an int8 copy of {model.name}'s head: there is none for these weights")
        return ScreenedHead.from_head(model.head, model.folder, save=True, progress=progress)
    return model.head


def check_engine(name: str) -> None:
    """Refuse a name that is no engine's."""
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r}; expected one of {', '.join(ENGINES)}")


def _screens(model: Model) -> bool:
    """Tell whether a copy was made for this model, and can be used at its speed."""
    from lmhead.head.screening.file import FILE_NAME, has_screen, may_have_screen
    from lmhead.head.screening.loops import can_compile

    folder, head = model.folder, model.head  # no folder: a model that was in memory already
    beside = folder is not None and (folder / FILE_NAME).is_file()  # if of other weights: made anew
    # The head's hash is worth its time only where a copy of its shape is there at all.
    in_cache = may_have_screen(head.vocab_size, head.hidden_size)
    return (beside or (in_cache and has_screen(None, head.sha256))) and can_compile()
