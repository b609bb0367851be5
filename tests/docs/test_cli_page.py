"""docs/cli.md is what `--help` says."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_help_says() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "write_cli.py"), "--check"], capture_output=True
    )
    assert done.returncode == 0, "docs/cli.md is out of date: run `make docs`"


def test_every_command_is_there() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name in ("next", "generate", "inspect", "trim", "verify", "steer train", "pull"):
        assert f"\n## lmhead {name}\n" in text
