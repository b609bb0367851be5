"""`lmhead lens`, `why`, `read`, `geometry` and `compare`, as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmhead.cli import render

PROMPT = "The capital of France is"
Call = Callable[..., Any]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    from rich.console import Console

    def narrow(width: int) -> None:
        monkeypatch.setattr(render, "out", lambda: Console(width=width, highlight=False))

    return narrow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lens", "Hi", "--plot", "x.jpg"], "expected a name that ends in .png"),
        (["why", "Hi", "--plot", "x.jpg"], "expected a name that ends in .png"),
        (["why", ""], "the prompt is empty"),
        (["why", "Hi", "--top", "0"], "--top"),
        (["read", "no-such-file.txt"], "there is no file no-such-file.txt"),
        (["read", "Hi", "--html", "."], "."),
        (["geometry", "a", "-m", "b"], "two models are named"),
        (["compare", "a"], "B is missing"),
        (["compare", "a", "b", "--text", "no.txt"], "there is no file no.txt"),
    ],
)
def test_wrong_options_are_told_before_the_model_is_loaded(
    call: Call, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] not in ("geometry", "compare"):
        arguments = [*arguments, "-m", str(tmp_path / "no-model")]
    done = call(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "no-model" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.model
def test_why_adds_up_on_any_terminal(
    call: Call, smollm2: Path, columns: Callable[[int], None], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    for width in (60, 100):
        columns(width)
        done = call("why", PROMPT, "--against", " London", "--top", "3")
        lines = done.stdout.splitlines()
        assert all(len(line) <= width for line in lines[:8])  # the last one wraps by itself
        assert lines[2].startswith("block 23 attention")
        reported = {line.split()[0]: float(line.split()[-3]) for line in lines if "sum" in line}
        assert reported["sum"] == pytest.approx(4.1263, abs=1e-3)
    picture = tmp_path / "why.png"
    reported = json.loads(
        call("why", PROMPT, "--token", "#7042", "--heads", "--plot", str(picture), "--json").stdout
    )
    assert sum(r["value"] for r in reported["reasons"]) == pytest.approx(
        reported["logit"], abs=1e-6
    )
    assert {r["head"] for r in reported["reasons"] if r["kind"] == "attention"} == set(range(9))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.model
def test_lens_shows_the_last_positions_where_room_is_short(
    call: Call, smollm2: Path, columns: Callable[[int], None], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    columns(40)
    done = call("lens", PROMPT, "--all")
    head, _, last, *_ = done.stdout.splitlines()
    assert '" is"' in head
    assert '" Paris"' in last
    assert "positions fit here" in done.stderr
    columns(60)
    picture = tmp_path / "lens.png"
    done = call("lens", PROMPT, "--token", " Paris", "--plot", str(picture))
    assert done.stdout.splitlines()[2].split()[:2] == ["29", '"']
    assert "the last row equals the model's own logits, bit by bit" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert call("lens", PROMPT, "--position", "5").returncode == 2
    # one position is all that is computed for a table, and it is the same one
    reported = json.loads(call("lens", PROMPT, "--json").stdout)
    for position in (1, -2):
        done = call("lens", PROMPT, "--position", str(position))
        cell = reported["rows"][-1]["cells"][position]
        assert f"{cell['entropy']:.2f}" in done.stdout.splitlines()[2]
        assert f"after {reported['tokens'][position]!r}" in done.stdout


@pytest.mark.model
def test_read_colours_lists_and_writes_a_page(call: Call, smollm2: Path, tmp_path: Path) -> None:
    text = "The capital of France is Berlin."
    page = tmp_path / "page.html"
    done = call("read", text, "--html", str(page))
    assert done.stdout.startswith(text)
    assert "perplexity" in done.stdout
    assert "Berlin" in page.read_text(encoding="utf-8")
    refused = call("read", text, "--html", str(page), "-m", str(tmp_path / "no-model"))
    assert (refused.returncode, "no-model" in refused.stderr) == (2, False)
    reported = json.loads(call("read", "-", "--json", stdin=text).stdout)
    assert [t["text"] for t in reported["tokens"]][-2:] == [" Berlin", "."]
    listed = call("read", text, "--surprises", "--top", "2").stdout.splitlines()
    assert len(listed) == 4


@pytest.mark.model
def test_geometry_and_compare(call: Call, smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    picture = tmp_path / "shape.png"
    done = call(
        "geometry", "smollm2-135m", "--near", " Paris", "--top", "3", "--plot", str(picture)
    )
    assert "43.5 of 576; 348.9 centred" in done.stdout
    assert '"Paris"' in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = call("compare", "smollm2-135m", "smollm2-135m", "--text", PROMPT)
    assert "49,152 of 49,152 rows that both have are equal" in done.stdout
    assert "0 of 5 positions differ" in done.stdout
