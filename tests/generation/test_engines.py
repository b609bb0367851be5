"""Engines by name: the same tokens, whichever computes the head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation import generate
from lmhead.generation.engines import engine
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.file import FILE_NAME
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
        if file.name != FILE_NAME:
            (folder / file.name).symlink_to(file)
    return load(folder)


def test_the_screened_engine_gives_the_same_tokens(
    linked: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))  # other tests may have made a copy there
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


CONTROLS: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {28: 2.5, 30: -4.0}, "banned_ids": (198, 260)},
    {"no_repeat_ngram_size": 2, "min_tokens": 20},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": (), "penalty_last_n": 16},
    {"repetition_penalty": 1.2, "top_k": 30, "temperature": 0.9, "seed": 4},
    {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "seed": 4, "order": "llama.cpp"},
)


@pytest.mark.parametrize("controls", CONTROLS, ids=lambda c: "+".join(c))
def test_penalties_and_bans_give_the_same_tokens(
    linked: Model, controls: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the touched ids scored exactly, the rest of the logits is never asked for."""
    screened = engine(linked, "screened")
    assert isinstance(screened, ScreenedHead)
    options = {"temperature": 0.0, **controls, "max_tokens": 24, "batch_size": 3}
    dense = generate(PROMPTS, linked, **options)
    monkeypatch.setattr(ScreenedHead, "__call__", None)
    same = generate(PROMPTS, linked, head=screened, **options)
    assert [r.ids for r in same] == [r.ids for r in dense]


@pytest.mark.parametrize("controls", [{}, {"repetition_penalty": 1.2, "banned_ids": (28,)}])
def test_every_draw_of_a_batch_is_the_one_that_its_state_gives_alone(
    linked: Model, controls: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    screened = engine(linked, "screened")
    assert isinstance(screened, ScreenedHead)
    sample, drawn = ScreenedHead.sample, []

    def both(self: ScreenedHead, h: torch.Tensor, temperature: float, **options: Any) -> Any:
        alone = []
        for n in range(len(h)):
            edits = options["edits"]
            mine = {"generator": options["generator"][n].clone_state(), "limit": options["limit"]}
            mine["edits"] = None if edits is None else edits[n]
            alone.append(int(sample(self, h[n], temperature, **mine)))
        drawn.append((alone, sample(self, h, temperature, **options)))
        return drawn[-1][1]

    monkeypatch.setattr(ScreenedHead, "sample", both)
    generate(PROMPTS, linked, batch_size=3, temperature=0.8, seed=9, max_tokens=16, head=screened,
             **controls)  # fmt: skip
    assert len(drawn) >= 16
    for alone, together in drawn:
        assert alone == together.tolist()


@pytest.mark.parametrize("controls", [{}, {"repetition_penalty": 1.2, "banned_ids": (28,)}])
def test_plain_sampling_asks_for_a_draw_and_a_seed_stays_a_seed(
    linked: Model, controls: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    screened = engine(linked, "screened")
    assert isinstance(screened, ScreenedHead)
    monkeypatch.setattr(ScreenedHead, "__call__", None)
    # Alone and in a batch the body rounds differently. At a low temperature few tokens share the
    # probability, so that a draw hardly ever falls between; the test above is of equal states.
    options = {"temperature": 0.3, "seed": 9, "max_tokens": 16, "head": screened, **controls}
    together = generate(PROMPTS, linked, batch_size=3, **options)
    assert screened.stats.draws == sum(len(r.ids) for r in together)
    assert not screened.stats.fallbacks
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert generate(prompt, linked, **options)[0].ids == result.ids
        assert 28 not in result.ids or not controls


def test_what_the_engine_cannot_know_takes_all_logits(linked: Model) -> None:
    screened = engine(linked, "screened")
    assert isinstance(screened, ScreenedHead)
    for controls in (
        {"allowed_ids": (28, 198, 260, 354)},
        {"typical_p": 0.9, "seed": 1},  # looks at all probabilities
        {"order": ["top_k", "repetition_penalty"], "top_k": 5, "repetition_penalty": 1.3},
    ):
        options = {"max_tokens": 6, "seed": 1, **controls}
        assert (
            generate(PROMPTS[0], linked, head=screened, **options)[0].ids
            == generate(PROMPTS[0], linked, **options)[0].ids
        )
    assert screened.stats.states == 0


def test_rows_without_a_token_are_left_out_by_the_screen(linked: Model) -> None:
    """Padding rows that score highest: the screen itself leaves them out."""
    weight = linked.head.weight.detach()
    padding = 10 * weight[:64].sign()
    padded = ScreenedHead.from_head(LMHead(torch.cat([weight, padding, -padding])))
    expected = generate(PROMPTS[1], linked, max_tokens=8)[0].ids
    assert generate(PROMPTS[1], linked, max_tokens=8, head=padded)[0].ids == expected
    assert padded.stats.states == len(expected)
    h = linked.last_hidden(linked.encode(PROMPTS[1]))
    assert padded.topk(h, 1).ids.item() >= len(weight)


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


def test_auto_finds_a_copy_in_the_cache(
    linked: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("numba", reason="numba is missing")
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    bare = replace(linked, folder=None)  # as a model that was in memory already
    assert engine(bare) is linked.head
    assert capsys.readouterr().err == ""
    made = engine(bare, "screened")
    assert isinstance(made, ScreenedHead)
    assert made.path is not None
    assert made.path.is_relative_to(tmp_path)
    assert "making an int8 copy" in capsys.readouterr().err
    again = engine(bare)
    assert isinstance(again, ScreenedHead)
    assert again.path == made.path
    assert capsys.readouterr().err == ""
    other = replace(bare, head=LMHead(linked.head.weight.detach() * 2))
    assert engine(other) is other.head  # of the same shape, but of other weights


def test_a_stale_copy_beside_the_model_is_made_anew_and_told(
    linked: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", reason="numba is missing")
    engine(linked, "screened")
    capsys.readouterr()
    other = replace(linked, head=LMHead(linked.head.weight.detach() * 2))
    reported: list[str] = []
    assert isinstance(engine(other, note=reported.append), ScreenedHead)
    assert len(reported) == 1
    assert "making an int8 copy" in reported[0]
    assert isinstance(engine(other, note=reported.append), ScreenedHead)
    assert len(reported) == 1


@pytest.mark.parametrize("wrong", ["smollm2-135m", None, 3])
def test_what_is_no_model(wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"expected the result of lmhead.load"):
        engine(wrong)
