"""Writes the two lock files: every package that development and `make dist` use, with its hashes.

    python scripts/lock.py        # needs uv; `make lock` gives it one

torch is left to constraints.txt, and with it what only torch brings on a machine with CUDA: it
comes from PyPI on one machine and from PyTorch's own index, or as a file, on the next, with other
hashes.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
DIST = ["build", "cyclonedx-bom", "hatchling", "pip-audit", "twine"]
HEADER = "# Written by scripts/lock.py (`make lock`); torch is in constraints.txt, see there.\n"


def compiled(*arguments: str, asked: str = "") -> str:
    """Return what uv makes of requirements: pinned, for every platform, with hashes."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, input=asked, text=True, stdout=subprocess.PIPE, check=True
    )
    blocks = re.split(r"\n(?=\S)", done.stdout.strip())
    return HEADER + "\n".join(block for block in blocks if not LEFT_OUT.match(block)) + "\n"


def main() -> None:
    """Write both files."""
    given = sys.argv[1:]
    pinned = ["--constraint", "constraints.txt", *given]
    development = compiled("pyproject.toml", "--extra", "dev", *pinned)
    (ROOT / "requirements-dev.lock").write_text(development)
    (ROOT / "requirements-dist.lock").write_text(compiled("-", *pinned, asked="\n".join(DIST)))


if __name__ == "__main__":
    main()
