"""Tables on narrow terminals: bars go, texts are cut, numbers are whole or not there."""

from io import StringIO

import pytest
from rich.console import Console

from lmhead.cli import render

LONG = " a token of very many letters, longer than any terminal is wide"


def shown(width: int) -> str:
    table = render.table("token", "id", "logit", "probability", "cumulative", "")
    table.columns[-1].justify = "left"
    for text, number in ((" Paris", "7042"), (LONG, "49151")):
        bar = f"[cyan]{render.bar(0.77)}[/cyan]"
        table.add_row(render.token(text), number, "17.371", "77.25 %", "83.71 %", bar)
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_a_wide_terminal_shows_everything() -> None:
    assert f'"{LONG}"' in shown(140)
    assert "█" in shown(140)


@pytest.mark.parametrize("width", [100, 80, 60])
def test_ids_logits_and_probabilities_stay_whole(width: int) -> None:
    text = shown(width)
    for whole in ("7042", "49151", "17.371", "77.25 %", "83.71 %", "probability", '" Paris"'):
        assert whole in text
    assert "█" not in text


def test_a_number_that_has_no_room_is_left_out_not_cut() -> None:
    text = shown(36)
    assert "49151" in text
    assert "17.371" in text
    for line in text.splitlines():
        assert "…" not in "".join(line.split()[-2:]), "a number is cut"
    assert "77" not in text
