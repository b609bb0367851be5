"""Which engine answers for a model's head: by name, or the fastest one that is there."""

from importlib.util import find_spec
from pathlib import Path

from lmhead.errors import BadInput
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.progress import Progress, silent

ENGINES = ("auto", "dense", "screened", "max")


def engine(
    model: Model,
    name: str = "auto",
    *,
    keepset: Path | None = None,
    progress: Progress = silent,
) -> Head:
    """Return an engine with the verbs of `model.head`, and its answers.

    - `auto`: the screened one where its int8 copy was made (`lmhead screen`) and numba is there,
      else the dense one.
    - `screened`: made now where it was not.
    - `max`: Modular MAX (extra `max`); the same within float rounding.
    - `keepset`: only the rows of a keep-set file (`lmhead trim --form head`), in original ids.
    """
    check_engine(name)
    if keepset is not None:
        if name not in ("auto", "dense"):
            raise BadInput(f"a keep-set has its own engine; leave out the engine {name!r}")
        from lmhead.head.trimmed import TrimmedHead

        return TrimmedHead.from_file(model.head, keepset)
    if name == "max":
        from lmhead.head.max_head import MaxHead

        return MaxHead.from_head(model.head, progress=progress)
    if name == "screened" or (name == "auto" and _has_screen(model)):
        from lmhead.head.screened import ScreenedHead

        return ScreenedHead.from_head(model.head, model.folder, save=True, progress=progress)
    return model.head


def check_engine(name: str) -> None:
    """Refuse a name that is no engine's."""
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r}; expected one of {', '.join(ENGINES)}")


def _has_screen(model: Model) -> bool:
    from lmhead.head.screening.file import FILE_NAME

    folder = model.folder  # None for a model that was in memory already
    return folder is not None and (folder / FILE_NAME).is_file() and find_spec("numba") is not None
