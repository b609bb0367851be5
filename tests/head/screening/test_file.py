"""The int8 copy on disk: whole or absent, mapped, and never another head's."""

import stat

import pytest
import torch

from lmhead.errors import BadCheckpoint
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.file import FILE_NAME, load_screen, screen_paths


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def head() -> LMHead:
    return LMHead(torch.randn(300, 40, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_saved_and_mapped(head, folder):
    made = ScreenedHead.from_head(head, folder, save=True)
    assert made.path == folder / FILE_NAME
    assert [p.name for p in folder.iterdir()] == [FILE_NAME]
    found = ScreenedHead.from_head(head, folder)
    assert found.path == made.path
    h = torch.randn(5, 40)
    assert torch.equal(found.topk(h, 9).ids, ScreenedHead.from_head(head).topk(h, 9).ids)
    mapped = (folder / FILE_NAME).resolve()
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        assert str(mapped) in maps.read()


def test_found_again_without_work(head, folder, monkeypatch):
    ScreenedHead.from_head(head, folder, save=True)
    monkeypatch.setattr("lmhead.head.screened.build_screen", None)
    assert ScreenedHead.from_head(head, folder).path == folder / FILE_NAME


def test_of_another_head_is_made_anew(head, folder):
    other = LMHead(torch.randn(300, 40))
    ScreenedHead.from_head(other, folder, save=True)
    assert load_screen(folder / FILE_NAME, head.sha256) is None
    assert ScreenedHead.from_head(head, folder).path is None
    made = ScreenedHead.from_head(head, folder, save=True)
    assert load_screen(made.path, head.sha256) is not None
    assert load_screen(made.path, other.sha256) is None


@pytest.mark.parametrize("keep", [0, 5, 300, 5000])
def test_truncated(head, folder, keep):
    path = ScreenedHead.from_head(head, folder, save=True).path
    data = path.read_bytes()
    path.unlink()  # not in place: it is mapped
    path.write_bytes(data[:keep])
    with pytest.raises(BadCheckpoint, match="lmhead screen"):
        ScreenedHead.from_head(head, folder)
    assert ScreenedHead.from_head(head, folder, save=True, rebuild=True).path == path


def test_a_folder_that_cannot_be_written(head, tmp_path):
    (tmp_path / "file").write_text("no folder")
    made = ScreenedHead.from_head(head, tmp_path / "file", save=True)
    assert made.path == screen_paths(None, head.sha256)[0]
    assert ScreenedHead.from_head(head, tmp_path / "file").path == made.path
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o644


def test_nothing_is_left_behind_when_writing_fails(head, folder, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("lmhead.head.screening.file.save_file", fail)
    with pytest.raises(Exception, match="no space left"):
        ScreenedHead.from_head(head, folder, save=True)
    assert list(folder.iterdir()) == []


def test_nan_in_the_weights_is_refused():
    weight = torch.zeros(5, 4)
    weight[3, 1] = torch.nan
    with pytest.raises(BadCheckpoint, match="NaN"):
        ScreenedHead.from_head(LMHead(weight))
