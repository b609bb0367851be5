"""A head alone: saved and read back to the bit, converted without touching its model."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError, UnsupportedModel
from lmhead.head import LMHead, Scale
from lmhead.head.screened import ScreenedHead
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import load

Tiny = Callable[..., PreTrainedModel]
# norms of many kinds: RMSNorm, LayerNorm, with an offset, without a weight, with a projection
NAMES = ("llama", "gpt2", "gemma2", "cohere", "opt", "granite", "olmo", "bloom", "phi", "mamba",
         "gpt_neox", "falcon", "xglm", "nemotron", "recurrent_gemma")  # fmt: skip


def states(head: LMHead, from_block: bool) -> torch.Tensor:
    width = head.state_size if from_block else head.hidden_size
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_read_back_to_the_bit(name: str, tiny: Tiny, tmp_path: Path) -> None:
    head = LMHead.from_model(tiny(name))
    head.save_pretrained(tmp_path / "head")
    again = LMHead.from_pretrained(tmp_path / "head")
    for from_block in (False, True):
        h = states(head, from_block)
        assert torch.equal(again(h, from_block=from_block), head(h, from_block=from_block))
    assert again.sha256 == head.sha256
    assert repr(again) == repr(head)


def test_everything_that_a_head_can_have(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    norm = nn.Sequential(nn.LayerNorm(12, eps=1e-3), nn.Linear(12, 8), nn.GELU("tanh"))
    head = LMHead(
        torch.randn(70, 8, generator=g).bfloat16(),
        torch.randn(70, generator=g).bfloat16(),
        norm.bfloat16(),
        softcap=30.0,
        scale=Scale(3.0, divide=True),
        tied=True,
        logits_dtype=torch.float32,
        vocab_size=67,
        state_size=12,
    )
    head.save_pretrained(str(tmp_path / "head"))
    again = LMHead.from_pretrained(str(tmp_path / "head"))
    h = torch.randn(4, 12, generator=g).bfloat16()
    assert torch.equal(again(h, from_block=True), head(h, from_block=True))
    assert (again.sha256, repr(again)) == (head.sha256, repr(head))
    assert not any(p.requires_grad for p in again.parameters())
    mask = os.umask(0)
    os.umask(mask)
    for file in (tmp_path / "head").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_a_folder_is_replaced_only_by_force_and_if_it_is_ours(tmp_path: Path) -> None:
    head = LMHead(torch.randn(9, 4))
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(BadInput, match="already exists"):
        head.save_pretrained(tmp_path / "head")
    other = LMHead(torch.randn(9, 4))
    other.save_pretrained(tmp_path / "head", force=True)
    assert LMHead.from_pretrained(tmp_path / "head").sha256 == other.sha256
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    with pytest.raises(BadInput, match="did not write"):
        head.save_pretrained(tmp_path / "precious", force=True)


def test_a_head_is_no_whole_model(tmp_path: Path) -> None:
    LMHead(torch.randn(9, 4)).save_pretrained(tmp_path / "head")
    with pytest.raises(BadCheckpoint, match=r"holds a head alone.*LMHead.from_pretrained"):
        load(tmp_path / "head")


def test_a_norm_that_no_file_can_hold(tmp_path: Path) -> None:
    class Mine(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h

    norm = nn.LayerNorm(4)
    norm.hook = lambda: None  # type: ignore[assignment]
    for wrong in (Mine(), norm):
        with pytest.raises(UnsupportedModel, match="norm"):
            LMHead(torch.randn(9, 4), norm=wrong).save_pretrained(tmp_path / "head")
        assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"norm": {"module": "os", "class": "system"}},
        {"norm": {"module": "subprocess", "class": "Popen", "settings": {}}},
        {"norm": {"module": "torch.nn.modules.module", "class": "Callable"}},
        {"norm": {"module": "torch.nn.modules.linear", "class": "Linear", "parameters": [],
                  "buffers": [], "modules": {}, "settings": {"__class__": "x"}}},
        {"norm": []},
        {"scale": ["x", 1]},
        {"scale": [0, False]},
        {"softcap": -1},
        {"logits_dtype": "nn"},
        {"vocab_size": 10**9},
        {"tied": None, "softcap": "many"},
        {"scale": 3},
    ],
)  # fmt: skip
def test_a_folder_that_somebody_else_wrote(tmp_path: Path, change: dict[str, Any]) -> None:
    LMHead(torch.randn(9, 4), norm=nn.LayerNorm(4)).save_pretrained(tmp_path / "head")
    path = tmp_path / "head/head.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LMHeadError):
        LMHead.from_pretrained(tmp_path / "head")


def test_damaged_tensors(tmp_path: Path) -> None:
    LMHead(torch.randn(9, 4)).save_pretrained(tmp_path / "head")
    path = tmp_path / "head/head.safetensors"
    tensors = load_file(path)
    tensors["weight"][3, 1] = torch.nan
    save_file(tensors, path)
    with pytest.raises(BadCheckpoint, match="NaN"):
        LMHead.from_pretrained(tmp_path / "head")
    path.write_bytes(b"no")
    with pytest.raises(BadCheckpoint, match="damaged"):
        LMHead.from_pretrained(tmp_path / "head")
    path.unlink()
    with pytest.raises(BadCheckpoint, match="damaged"):
        LMHead.from_pretrained(tmp_path / "head")


# --- conversions --------------------------------------------------------------------------------


def convert(head: Any, how: str) -> Any:
    return head.to(torch.bfloat16) if how == "to" else getattr(head, how)()


@pytest.mark.parametrize("how", ["to", "bfloat16", "half", "double"])
@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_conversion_leaves_the_model_as_it_is(
    how: str, name: str, trimmed: bool, tiny: Tiny
) -> None:
    model = tiny(name, tie_word_embeddings=True)
    before = {n: (p, p.clone()) for n, p in model.named_parameters()}
    head: Any = LMHead.from_model(model)
    if trimmed:
        head = TrimmedHead(head, range(50))
    h = torch.randn(3, model.get_output_embeddings().in_features)
    z = head(h).detach()
    assert convert(head, how) is head
    for n, p in model.named_parameters():
        assert p is before[n][0]
        assert torch.equal(p, before[n][1])
        assert p.dtype == torch.float32
    got = head(h)
    assert got.dtype == {"half": torch.float16, "double": torch.float64}.get(how, torch.bfloat16)
    torch.testing.assert_close(got.float(), z, rtol=0.05, atol=0.2)
    assert all(p.dtype == got.dtype for p in head.parameters())


def test_where_nothing_changes_the_tensors_stay_shared(tiny: Tiny) -> None:
    model = tiny("llama")
    head = LMHead.from_model(model)
    for same in (head.to(torch.float32), head.to("cpu"), head.float(), head.cpu()):
        assert same is head
    assert head.weight is model.lm_head.weight
    assert head.norm is model.model.norm


def test_as_a_part_of_something_larger_sharing_goes_on(tiny: Tiny) -> None:
    model = tiny("llama")
    both = nn.ModuleDict({"model": model, "head": LMHead.from_model(model)})
    both.to(torch.bfloat16)
    assert both["head"].weight is model.lm_head.weight
    assert both["head"].norm is model.model.norm
    assert model.dtype == torch.bfloat16


def test_a_head_is_made_of_floating_point_numbers() -> None:
    with pytest.raises(BadInput, match="floating point"):
        LMHead(torch.randn(9, 4)).to(torch.int8)


# --- wrong types --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["smollm2-135m", None, 3, Path("here")])
def test_what_is_no_model(wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"expected a causal language model.*from_pretrained"):
        LMHead.from_model(wrong)


@pytest.mark.parametrize("wrong", [None, 3, ["a"], torch.nn.Linear(2, 2)])
def test_what_is_no_name(wrong: Any) -> None:
    with pytest.raises(BadInput, match="expected a folder"):
        LMHead.from_pretrained(wrong)


def test_what_is_no_head() -> None:
    for make in (ScreenedHead.from_head, lambda head: TrimmedHead(head, [1, 2])):
        with pytest.raises(BadInput, match="expected an LMHead"):
            make("head")
    for wrong in ([[1.0]], None, torch.randn(3, 3).numpy()):
        with pytest.raises(BadInput, match="expected floating point"):
            LMHead(wrong)  # type: ignore[arg-type]
