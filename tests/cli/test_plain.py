"""Names and metadata of others reach the terminal as text, never as orders or markup."""

import json
from pathlib import Path

import pytest

from lmhead.cli import run
from lmhead.cli.plain import plain, plain_json

ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b5m‮"


def test_plain_keeps_text_and_shows_the_rest_by_number() -> None:
    assert plain("Grüße, 世界 🎉\n\tx [bold]") == "Grüße, 世界 🎉\n\tx [bold]"
    assert plain(ESCAPE) == r"\x1b]0;owned\x07\x1b[31mred\x9b5m\u202e"
    assert plain("\ud800") == r"\ud800"
    text = json.dumps({"a": ESCAPE + "\ud800"}, ensure_ascii=False)
    assert json.loads(plain_json(text)) == {"a": ESCAPE + "\ud800"}
    assert plain_json(text).isprintable()


def test_no_staging_name_is_shown(tmp_path: Path) -> None:
    from lmhead.files.whole import folder_whole, written_whole

    with folder_whole(tmp_path / "out [1]") as folder, written_whole(folder / "x.gguf") as file:
        assert plain(f"loading {file} ...") == f"loading {tmp_path}/out [1]/x.gguf ..."


def gguf_with(architecture: str, path: Path) -> Path:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((32, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_escape_sequences_of_a_gguf_stay_in_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = gguf_with(ESCAPE, tmp_path / "x.gguf")
    assert run(["inspect", str(path), *options]) == 0
    shown = capfd.readouterr()
    assert not {"\x1b", "\x07", "\x9b", "‮"} & set(shown.out + shown.err)


def test_markup_in_a_name_is_a_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("[red]x[/bold]", "[/]", "[link=file:///etc]y[/link]"):
        assert run(["inspect", name]) == 1
        assert name in capfd.readouterr().err
    folder = tmp_path / "[red]x[bold]"
    folder.mkdir()
    gguf_with("[/red]", folder / "[b]x.gguf")
    assert run(["inspect", str(folder / "[b]x.gguf")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "[red]x[bold]/[b]x.gguf: [/red]" in shown
