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
)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by what /proc tells")
@pytest.mark.parametrize("reader", READERS)
def test_a_mutated_file_is_read_or_refused(reader: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HARNESS), reader, "--count", "300", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "300 tried" in done.stdout
