"""`lmhead screen` on a tiny model, run as the program runs it."""

import json

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from lmhead.cli.screen import screen
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead

app = typer.Typer()
app.command()(screen)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_makes_the_copy_once(model):
    first = CliRunner().invoke(app, [str(model), "--json"], catch_exceptions=False)
    report = json.loads(first.stdout)
    assert report["vocab_size"] == 320
    assert report["share_of_float32"] <= 0.27
    head = LMHead.from_pretrained(model)
    assert report["head_sha256"] == head.sha256
    made = (model / "lmhead.screen").stat()
    again = CliRunner().invoke(app, [str(model), "--json"], catch_exceptions=False)
    assert json.loads(again.stdout) == report
    assert (model / "lmhead.screen").stat().st_mtime_ns == made.st_mtime_ns
    CliRunner().invoke(app, [str(model), "--rebuild"], catch_exceptions=False)
    assert (model / "lmhead.screen").stat().st_ino != made.st_ino


def test_the_models_own_head_finds_it(model):
    CliRunner().invoke(app, [str(model)], catch_exceptions=False)
    loaded = LlamaForCausalLM.from_pretrained(model)
    screened = ScreenedHead.from_head(LMHead.from_model(loaded), model)
    assert screened.path == model / "lmhead.screen"
    h = torch.randn(5, 256)
    expected = loaded.lm_head(h).topk(3).indices
    assert torch.equal(screened.topk(h, 3).ids, expected)
