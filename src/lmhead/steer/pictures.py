"""Pictures: asked for early, written whole."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lmhead.errors import BadInput, MissingExtra, how_to_install
from lmhead.steer.vector import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed for it."""
    if path.suffix != ".png":
        raise BadInput(f"the picture's file is {path.name}; expected a name in .png")
    if find_spec("matplotlib") is None:
        raise MissingExtra(f"--plot needs matplotlib; install it with: {how_to_install('plot')}")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as a `.png` file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_whole(path, content.getvalue())
