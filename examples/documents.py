"""Write a corpus of English documents to trim a model with: docstrings and licences.

    python examples/documents.py corpus.jsonl held.jsonl
    lmhead trim smollm2-135m --corpus corpus.jsonl --out small

The docstrings are those of Python's standard library, the licences those of the packages that are
installed here (and of the system, where it keeps some), in pieces of some 2,000 characters. How
many there are depends on what is installed. Fifty longer texts, chosen by a fixed seed, go to the
second file, for looking at what the trimmed model does on texts that it was not trimmed for.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD = 50


def docstrings() -> Iterator[str]:
    """Yield those of modules, classes and functions of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    yield text


def licences() -> Iterator[str]:
    """Yield them in pieces that end where a paragraph does."""
    places = (Path("/usr/share/common-licenses"), Path(sysconfig.get_path("purelib")))
    for place in places:
        for path in sorted(place.rglob("*")):
            named = path.name.upper().startswith(("LICEN", "COPYING", "NOTICE"))
            if not path.is_file() or not (named or place is places[0]) or path.suffix == ".py":
                continue
            try:
                text = path.read_text("utf-8")
            except (ValueError, OSError):
                continue
            piece = ""
            for paragraph in text.split("\n\n"):
                piece += paragraph + "\n\n"
                if len(piece) > 2000:
                    yield piece.strip()
                    piece = ""
            yield piece.strip()


def main(corpus: str, held: str) -> None:
    """Write both files."""
    texts = [t for t in dict.fromkeys([*docstrings(), *licences()]) if t]
    random.Random(1).shuffle(texts)
    kept_back = [t for t in texts if len(t) > 250][:HELD]
    rest = sorted(set(texts) - set(kept_back))
    for name, part in ((corpus, rest), (held, kept_back)):
        Path(name).write_text("".join(json.dumps({"text": t}) + "\n" for t in part), "utf-8")
    print(f"{len(rest):,} texts in {corpus}, {len(kept_back)} in {held}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", metavar="CORPUS.jsonl")
    parser.add_argument("held", metavar="HELD.jsonl")
    options = parser.parse_args()
    main(options.corpus, options.held)
