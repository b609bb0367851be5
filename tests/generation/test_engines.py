"""Engines by name: the same tokens, whichever computes the head."""

from pathlib import Path

import pytest

from lmhead.errors import BadInput
from lmhead.generation import engine, generate
from lmhead.head.screened import ScreenedHead
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import Model, load
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepfile import KeepFile

pytestmark = pytest.mark.model
PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):")


@pytest.fixture(scope="module")
def linked(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The real model in a folder of our own, so that its int8 copy is not left in the cache."""
    folder = tmp_path_factory.mktemp("smollm2")
    for file in smollm2.iterdir():
        (folder / file.name).symlink_to(file)
    return load(folder)


def test_the_screened_engine_gives_the_same_tokens(linked: Model) -> None:
    assert engine(linked, "auto") is linked.head  # no copy was made yet
    screened = engine(linked, "screened")
    assert isinstance(screened, ScreenedHead)
    options = {"max_tokens": 24, "batch_size": 1}
    dense = generate(PROMPTS, linked, **options)
    assert [r.ids for r in generate(PROMPTS, linked, head=screened, **options)] == [
        r.ids for r in dense
    ]
    assert screened.stats.states == sum(len(r.ids) for r in dense)
    sampled = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 11, **options}
    assert [r.ids for r in generate(PROMPTS, linked, head=screened, **sampled)] == [
        r.ids for r in generate(PROMPTS, linked, **sampled)
    ]


def test_auto_takes_the_copy_that_is_there(linked: Model) -> None:
    pytest.importorskip("numba", reason="needs the extra `fast`")
    engine(linked, "screened")
    assert isinstance(engine(linked, "auto"), ScreenedHead)
    assert engine(linked, "dense") is linked.head


def test_a_keep_set_answers_in_original_ids(linked: Model, tmp_path: Path) -> None:
    whole = generate(PROMPTS[0], linked, max_tokens=8)[0].ids
    path = tmp_path / "kept.safetensors"
    kept = sorted({*whole, *range(2000)})
    KeepFile(TrimMap.of(kept, linked.head.vocab_size), linked.name, linked.head.sha256).save(path)
    trimmed = engine(linked, keepset=path)
    assert isinstance(trimmed, TrimmedHead)
    assert generate(PROMPTS[0], linked, max_tokens=8, head=trimmed)[0].ids == whole
    drawn = generate(PROMPTS[1], linked, max_tokens=16, head=trimmed, temperature=1.5, seed=2)
    assert set(drawn[0].ids) <= set(kept)


def test_unknown_engines(linked: Model, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected one of auto, dense, screened, max"):
        engine(linked, "warp")
    with pytest.raises(BadInput, match="keep-set"):
        engine(linked, "screened", keepset=tmp_path / "x")
