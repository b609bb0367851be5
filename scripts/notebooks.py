"""Runs the notebooks of examples/, and stores what they print and draw.

    python scripts/notebooks.py                          # run them all; an error ends the program
    python scripts/notebooks.py --write FILE.ipynb ...   # and store the outputs in the files

Cells run in this process, one after the other, in one namespace: what a cell prints, the value of
its last line and the figures that it leaves open are its outputs, as in Jupyter. Jupyter itself is
not needed.
"""

import argparse
import ast
import base64
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(notebook: dict[str, Any], folder: Path, name: str = "notebook") -> None:
    """Run every code cell in a folder, and put its outputs into the notebook."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                cell["outputs"] = run_cell("".join(cell["source"]), names, f"{name}[{number}]")
    finally:
        os.chdir(before)


def run_cell(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Run one cell; return what it printed, the value of its last line, and its figures."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said, value = io.StringIO(), None
    with redirect_stdout(said):
        exec(compile(tree, where, "exec"), names)  # noqa: S102  # our own notebooks
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(said.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = lines(value._repr_html_())
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs + [
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}}
        for picture in pictures()
    ]


def pictures() -> list[str]:
    """Return the open figures of matplotlib as base64 text, and close them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    pyplot = sys.modules["matplotlib.pyplot"]
    found = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        metadata = {"Software": None}  # the same picture, whatever the version that drew it
        pyplot.figure(number).savefig(buffer, dpi=80, bbox_inches="tight", metadata=metadata)
        found.append(base64.b64encode(buffer.getvalue()).decode())
    pyplot.close("all")
    return found


def lines(text: str) -> list[str]:
    """Return a text as notebooks store it."""
    return text.splitlines(keepends=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=sorted(EXAMPLES.glob("*.ipynb")))
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    args = parser.parse_args()
    for path in args.files:
        print(f"running {path.name}", file=sys.stderr)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder), path.stem)
        if args.write:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
