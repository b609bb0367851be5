"""A few hundred mutations for each reader in every run; `harness.py` goes on without end."""

import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("harness.py")
READERS = (
    "safetensors",
    "gguf",
    "convert",
    "config",
    "config-and-weights",
    "index",
    "tokenizer",
    "tokenizer-config",
    "stamp",
    "vector",
    "card",
    "control-vector",
    "keep-set",
    "ids",
    "counts",
    "trim-report",
    "trim-tokenizer",
    "training-state",
    "checkpoint",
    "saved-head",
    "schema",
    "screen",
    "corpus",
    "prompts",
    "statements",
)
# Each loads a model or renders a template: tens of milliseconds instead of less than one. Others of
# their kind (head-config, load-generation, load-tokenizer-config) are left to `make fuzz`.
SLOWER = ("load-config", "load-tokenizer", "trim-folder", "template")


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by what /proc tells")
@pytest.mark.parametrize("reader", READERS + SLOWER)
def test_a_mutated_file_is_read_or_refused(reader: str, tmp_path: Path) -> None:
    if reader == "schema":
        pytest.importorskip("llguidance")
    count = "40" if reader in SLOWER else "300"
    command = [sys.executable, str(HARNESS), reader, "--count", count, "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{count} tried" in done.stdout
