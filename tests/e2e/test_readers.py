"""What a person hands over (ids, counts, corpora, prompts, schemas, data): one line when wrong."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmhead.cli.rows import rows_of
from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.head.screening.file import has_screen
from lmhead.steer.learn.reading import read_data
from lmhead.steer.vector import SteeringVector
from lmhead.trim.corpus import Corpus
from lmhead.trim.counts import Counts
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.keepset import read_ids

DEEP = "[" * 100_000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("ids", read_ids),
        ("ids.safetensors", read_ids),
        ("counts", Counts.load),
        ("keep.safetensors", KeepFile.load),
        ("v.safetensors", SteeringVector.load),
        ("corpus.txt", lambda path: Corpus((path,))),
    ],
)
def test_a_pipe_instead_of_a_file_is_not_waited_for(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(LMHeadError, match=r"regular file|a pipe"):
        read(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_instead_of_a_screen_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lmhead.screen")
    assert not has_screen(tmp_path, "0" * 64)


@pytest.mark.parametrize("text", [DEEP, "[1e999]", "[1.5]", "[true]", "[[1]]", '[{"a": 1}]'])
def test_a_list_that_holds_no_ids(text: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text)
    with pytest.raises(BadInput, match="not an id"):
        read_ids(tmp_path / "ids")


def test_counts_that_do_not_add_up() -> None:
    with pytest.raises(BadInput, match="2 and 3 ids"):
        Counts("x", np.array([1, 2]), 1) + Counts("x", np.array([1, 2, 3]), 1)
    with pytest.raises(BadInput, match="64 bits"):
        Counts("x", np.array([2**62]), 1) + Counts("x", np.array([2**62]), 1)


@pytest.mark.parametrize("line", [DEEP, '{"prompt":' * 5000])
def test_prompts_nested_too_deeply(line: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match="line 1"):
        list(rows_of(tmp_path / "p.jsonl", "prompt"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.jsonl", DEEP),
        ("d.jsonl", '{"statement": "\\ud800", "label": 1}'),
        ("d.csv", "statement,label\n" + "x" * 200_000 + ",1\n"),
    ],
)
def test_statements_that_are_none(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput):
        read_data(tmp_path / name)


@pytest.mark.parametrize(
    "values",
    [
        *({"json_schema": text} for text in ("[]", "7", '"x"', "true", "null", DEEP)),
        {"json_schema": '{"const": "\\ud800"}'},
        {"json_schema": '{"minimum": NaN}'},
        {"json_schema": {"enum": {1}}},
        {"json_schema": {"enum": list(range(100_000))}},  # takes minutes to compile
        {"regex": "\ud800"},
        {"regex": "x" * 300_000},
        {"grammar": 'start: "\ud800"'},
    ],
)
def test_schemas_and_grammars_that_are_none(values: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    from lmhead.sampling.guided import check_guide

    with pytest.raises(BadInput):
        check_guide(**values)


def test_a_head_that_names_what_it_should_not(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    import json

    from lmhead.head import LMHead

    LMHead.from_model(tiny("llama")).save_pretrained(tmp_path / "head")
    about = tmp_path / "head" / "head.json"
    sound = json.loads(about.read_text())
    for module, name in (("os", "system"), ("torch.nope", "X"), ("transformers", "pipeline")):
        about.write_text(json.dumps(sound | {"norm": sound["norm"] | {"module": module}}))
        with pytest.raises(BadCheckpoint):
            LMHead.from_pretrained(tmp_path / "head")
        about.write_text(json.dumps(sound | {"norm": {**sound["norm"], "class": name}}))
        with pytest.raises(BadCheckpoint):
            LMHead.from_pretrained(tmp_path / "head")


SPOOL = """
import sys, time
from pathlib import Path
from lmhead.cli.count import Errors, open_corpus
with open_corpus([Path("-")], "text", Errors.fail) as corpus:
    print(corpus.paths[0], flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.skipif(os.name != "posix", reason="leftovers are told by locks")
def test_what_was_read_from_stdin_is_private_and_swept_after_a_kill(tmp_path: Path) -> None:
    def start(seconds: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", SPOOL, seconds]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        run = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)
        assert run.stdin is not None
        run.stdin.write(b"some text")
        run.stdin.close()
        return run

    with start("60") as killed:
        assert killed.stdout is not None
        spooled = Path(killed.stdout.readline().decode().strip())
        assert spooled.read_text() == "some text"
        assert stat.S_IMODE(spooled.parent.stat().st_mode) == 0o700
        killed.kill()
    assert list(tmp_path.iterdir()) == [spooled.parent]
    with start("0") as whole:
        assert whole.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
    assert tempfile.gettempdir() != str(tmp_path)
