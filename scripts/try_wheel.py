"""Installs the wheel of dist/ into fresh environments, without and with extras, and lets it answer.

    python scripts/try_wheel.py python3.11 python3.12 python3.13

For each interpreter: a new venv, the wheel with what it needs (pinned by constraints.txt), the next
token of a prompt, and one line from every command whose extra is missing. Then some extras join it,
and the same commands answer. Run by `make try-wheel`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A command that needs an extra, and the extra that its one line must name.
MISSING = {
    "explore --no-browser": "serve",
    "serve": "serve",
    "generate Hi --regex a": "guided",
    "lens Hi --plot lens.png": "plot",
    "generate Hi --engine max": "max",
    "generate Hi --body llama.cpp": "llamacpp",
    "count text.txt -o counts --ray local": "ray",
}
EXTRAS = "guided,plot,serve"


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program and keep what it prints."""
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)


def install(python: Path, what: str) -> None:
    """Install with pip, pinned by constraints.txt; a failure ends the program."""
    done = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--constraint", ROOT / "constraints.txt", what)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr}")


def attempt(python: str, wheel: Path) -> str:
    """Install the wheel for one interpreter; return what it said, or end the program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (done := run(python, "-m", "venv", folder / "venv")).returncode:
            raise SystemExit(f"{python}: {done.stderr}")
        install(folder / "venv/bin/python", str(wheel))
        (folder / "text.txt").write_text("The capital of France is Paris.\n")
        lmhead = folder / "venv/bin/lmhead"
        best = json.loads(answer(lmhead, "next", "The capital of France is", "--json", cwd=folder))
        for words, extra in MISSING.items():
            done = run(lmhead, *words.split(), cwd=folder)
            line = done.stderr.strip().splitlines()[-1:] or [""]
            if done.returncode != 1 or f"lmhead[{extra}]" not in line[0]:
                raise SystemExit(f"{python}: lmhead {words}: {done.returncode}\n{done.stderr}")
        install(folder / "venv/bin/python", f"{wheel}[{EXTRAS}]")
        with_extras(lmhead, folder)
        version = answer(lmhead, "-V", cwd=folder).strip()
        return (
            f"{python}: {version}, next token {best['tokens'][0]['token']!r}, "
            f"{len(MISSING)} missing extras named; with {EXTRAS}: grammar, picture, server, page"
        )


def with_extras(lmhead: Path, folder: Path) -> None:
    """Ask for what the extras bring: a grammar, a picture, the server and the page."""
    if answer(lmhead, "generate", "Hi", "--regex", "a{3}", "--json", cwd=folder).count("aaa") < 1:
        raise SystemExit("the regular expression a{3} did not give aaa")
    answer(lmhead, "lens", "Hi", "--plot", "lens.png", cwd=folder)
    if not (folder / "lens.png").read_bytes().startswith(b"\x89PNG"):
        raise SystemExit("lens --plot wrote no picture")
    for words, path in (("serve", "/v1/models"), ("explore --no-browser", "/")):
        command = [str(lmhead), *words.split(), "--port", "0", "--json"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                url = ready(server)["url"]
                with urllib.request.urlopen(url.rstrip("/") + path, timeout=60) as reply:  # noqa: S310 - our own server, on loopback
                    if reply.status != 200:
                        raise SystemExit(f"lmhead {words}: {reply.status}")
            finally:
                server.terminate()


def ready(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the one JSON object that a server prints when it is ready."""
    text = ""
    for line in server.stdout or ():
        text += line
        if line.rstrip() == "}":
            break
    found: dict[str, Any] = json.loads(text)
    return found


def answer(*command: object, cwd: Path) -> str:
    """Run a command that must succeed; return what it prints."""
    done = run(*command, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[1:]))}: {done.stderr}")
    return done.stdout


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    args = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("lmhead-*.whl"))
    if not wheels:
        raise SystemExit("there is no wheel in dist/; run `make dist` first")
    for python in args.pythons:
        print(attempt(python, wheels[-1]))


if __name__ == "__main__":
    main()
