"""What MODEL means, in order, and what a wrong one is told."""

import json
from pathlib import Path

import pytest

from lmhead.errors import BadInput, ModelNotFound, UnsupportedModel
from lmhead.models.resolve import resolve


def test_a_folder_comes_before_a_built_in_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m") == Path("smollm2-135m")


@pytest.mark.model
def test_a_built_in_name(smollm2: Path) -> None:
    assert resolve("smollm2-135m") == smollm2


def test_a_nearly_right_name_is_suggested() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2-135m'\?"):
        resolve("smolm2-135m")


@pytest.mark.parametrize("name", ["no/such/path", "./here", "what is this"])
def test_neither_path_nor_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match="lmhead models"):
        resolve(name)


def test_an_unknown_hub_id_offline() -> None:
    with pytest.raises(ModelNotFound, match=r"check the spelling or the network"):
        resolve("nobody/nothing-at-all")


def test_an_empty_name() -> None:
    with pytest.raises(BadInput, match="empty"):
        resolve("   ")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_text("")
    with pytest.raises(UnsupportedModel, match=r"not a \.gguf file"):
        resolve(file)


def test_a_hub_id_in_the_cache_is_found_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    revision = "0" * 40
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({}))
    refs = tmp_path / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(revision)
    assert resolve("someone/tiny") == snapshot
