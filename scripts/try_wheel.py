"""Installs the wheel of dist/ into fresh environments, without any extra, and lets it answer.

    python scripts/try_wheel.py python3.11 python3.12 python3.13

For each interpreter: a new venv, the wheel with what it needs (pinned by constraints.txt), the next
token of a prompt, and one line from every command whose extra is missing. Run by `make try-wheel`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program and keep what it prints."""
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)


def attempt(python: str, wheel: Path) -> str:
    """Install the wheel for one interpreter; return what it said, or end the program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in (
            (python, "-m", "venv", folder / "venv"),
            (folder / "venv/bin/python", "-m", "pip", "install", "--quiet",
             "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt", wheel),
        ):  # fmt: skip
            if (done := run(*command)).returncode:
                raise SystemExit(f"{python}: {done.stderr}")
        (folder / "text.txt").write_text("The capital of France is Paris.\n")
        lmhead = folder / "venv/bin/lmhead"
        done = run(lmhead, "next", "The capital of France is", "--json", cwd=folder)
        if done.returncode:
            raise SystemExit(f"{python}: {done.stderr}")
        best = json.loads(done.stdout)["tokens"][0]["token"]
        for words, extra in MISSING.items():
            done = run(lmhead, *words.split(), cwd=folder)
            line = done.stderr.strip().splitlines()[-1:] or [""]
            if done.returncode != 1 or f"lmhead[{extra}]" not in line[0]:
                raise SystemExit(f"{python}: lmhead {words}: {done.returncode}\n{done.stderr}")
        version = run(lmhead, "-V").stdout.strip()
        return f"{python}: {version}, next token {best!r}, {len(MISSING)} missing extras named"


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
