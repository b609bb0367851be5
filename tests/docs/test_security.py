"""Every test that docs/security.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_what_the_page_names_exists() -> None:
    tests = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("tests/**/test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in tests] == []
    files = re.findall(r"`((?:tests|src)/[\w/.]+)`", PAGE)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_door_has_a_test() -> None:
    for number in range(1, 12):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {number}. "))
        assert "test" in row.split("|")[2]
