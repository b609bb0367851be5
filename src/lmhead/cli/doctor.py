"""`lmhead doctor`: what is installed, what is cached, which engine answers, and what would help."""

import os
import platform
import sys
from typing import Any

from lmhead.cli.options import Json, Model
from lmhead.models.registry import DEFAULT_MODEL

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numba", "numpy")
# The package that shows whether an extra is installed, and what the extra is for.
_EXTRAS = {
    "guided": ("llguidance", "JSON schemas, regular expressions and grammars"),
    "plot": ("matplotlib", "pictures with --plot"),
    "llamacpp": ("llama-cpp-python", "running .gguf files with llama.cpp"),
    "max": ("max", "the Modular MAX engine"),
    "ray": ("ray", "counts and trims on a Ray cluster"),
    "serve": ("fastapi", "lmhead serve and lmhead explore"),
}


def doctor(model: Model = DEFAULT_MODEL, json: Json = False) -> None:
    """Report what is installed and cached, which engine `auto` picks, and what would help.

    It loads no model and reads no weights.
    """
    from lmhead.cli import render

    report = facts() | {"cache": _cache(), "engine": _engine(model)}
    report["advice"] = _advice(report)
    if json:
        render.print_json(report)
        return
    for name, rows in (("lmhead", facts_table(report)), ("cache", _cache_rows(report["cache"]))):
        shown = render.Facts(name)
        for label, value in rows:
            shown(label, value)
        shown.print()
    shown = render.Facts(f"engine for {model}")
    shown("auto picks", f"{report['engine']['auto']}: {report['engine']['why']}")
    shown.print()
    for line in report["advice"]:
        render.say(f"suggestion: {line}")
    if not report["advice"]:
        render.say("no suggestions: everything that lmhead can use here is set up")


def facts() -> dict[str, Any]:
    """Collect what a bug report needs: versions, extras, machine."""
    from lmhead import __version__

    return {
        "lmhead": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": _cpus(),
        "packages": {name: _version(name) for name in _NEEDED},
        "extras": {extra: _version(package) for extra, (package, _) in _EXTRAS.items()},
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def facts_table(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Turn the facts into rows of a name and a value."""
    packages = (f"{name} {number or 'MISSING'}" for name, number in found["packages"].items())
    threads = found["threads"]
    limited = f", OMP_NUM_THREADS={threads}" if threads else ""
    return [
        ("version", found["lmhead"]),
        ("Python", f"{found['python']} ({sys.executable})"),
        ("machine", f"{found['platform']}, {found['cpus']} CPUs{limited}"),
        ("packages", ", ".join(packages)),
        *(
            (f"extra {extra}", f"{number or 'not installed'} ({_EXTRAS[extra][1]})")
            for extra, number in found["extras"].items()
        ),
    ]


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache() -> dict[str, Any]:
    from lmhead.files.cache import cache_root
    from lmhead.files.contents import entries

    found = entries()
    return {
        "folder": str(cache_root()),
        "bytes": sum(entry.nbytes for entry in found),
        "entries": [
            {"kind": entry.kind, "name": entry.name, "bytes": entry.nbytes} for entry in found
        ],
    }


def _cache_rows(cache: dict[str, Any]) -> list[tuple[str, str]]:
    from lmhead.cli import render
    from lmhead.files.contents import KINDS

    rows = [("folder", f"{cache['folder']} (set LMHEAD_CACHE to change it)")]
    for entry in cache["entries"]:
        rows.append((KINDS[entry["kind"]], f"{entry['name']}, {render.size(entry['bytes'])}"))
    rows.append(("total", render.size(cache["bytes"])))
    return rows


def _engine(model: str) -> dict[str, Any]:
    """Return which engine `auto` picks, judging only by what is on disk."""
    from lmhead.inspect import inspect_model
    from lmhead.models.fetch import folder_of, is_here
    from lmhead.models.registry import BUILT_IN

    if model in BUILT_IN and not is_here(model):
        why = f"{model} is not in the cache yet; `lmhead pull {model}` downloads it"
        return {"auto": "dense", "why": why, "screen": False, "compiled": None}
    if _version("numba") is None:
        why = "numba is not installed, and without it the dense engine is faster"
        return {"auto": "dense", "why": why, "screen": None, "compiled": False}

    from pathlib import Path

    from lmhead.head.screening.file import FILE_NAME, may_have_screen
    from lmhead.head.screening.loops import can_compile

    folder = folder_of(model) if model in BUILT_IN else Path(model)
    report = inspect_model(model)
    screen = (folder / FILE_NAME).is_file()
    screen = screen or may_have_screen(report.vocab_size, report.hidden_size)
    compiled = can_compile()
    if screen and compiled:
        why = "there is an int8 copy of the head, and its loops can be compiled"
        return {"auto": "screened", "why": why, "screen": True, "compiled": True}
    why = "there is no int8 copy of this head"
    if screen:
        why = "numba has no writable folder for its compiled loops"
    return {"auto": "dense", "why": why, "screen": screen, "compiled": compiled, "model": model}


def _advice(report: dict[str, Any]) -> list[str]:
    from lmhead.errors import how_to_install

    lines = []
    engine = report["engine"]
    if engine["compiled"] is False:
        lines.append(
            "to let numba keep its compiled loops: pip install numba, and set LMHEAD_CACHE or "
            "NUMBA_CACHE_DIR to a writable folder"
        )
    elif engine["screen"] is False and engine["compiled"]:
        lines.append(f"for faster answers with the same tokens: lmhead screen {engine['model']}")
    threads = report["threads"]
    if threads and threads.isdigit() and int(threads) < report["cpus"]:
        lines.append(
            f"unset OMP_NUM_THREADS: it limits torch to {threads} of {report['cpus']} CPUs"
        )
    missing = [extra for extra, number in report["extras"].items() if number is None]
    lines += [f"for {_EXTRAS[extra][1]}: {how_to_install(extra)}" for extra in missing]
    return lines
