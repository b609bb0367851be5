"""Why: the parts add up to the model's own logit, and are what was really added."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.body import TorchBody
from lmhead.body.parts import parts_of
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.head import LMHead
from lmhead.inspect.attribution import Why, explained, why
from lmhead.inspect.lens import looked
from lmhead.inspect.tokens import Token
from lmhead.loading import load
from tiny_models import without_words as whole

Tiny = Callable[..., PreTrainedModel]
IDS = [3, 4, 5, 6]
WITHIN = 1e-4  # of the logit: what the model's own rounding may leave unexplained

# Post-norms, multipliers, parallel blocks, experts, recurrence, softcaps, biases, positions,
# projections: sixty architectures, of the hundred and forty that can be taken apart.
SAMPLE = """
afmoe apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl dbrx deepseek_v2
deepseek_v3 diffllama dots1 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba gemma gemma2
gemma3_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
granitemoehybrid granitemoeshared helium jamba kimi_linear lfm2 llama llama4_text mamba mamba2
mbart minicpm3 mistral mixtral mpt nanochat nemotron nemotron_h olmo olmo2 olmoe opt persimmon phi
phi3 qwen2_moe qwen3 qwen3_next recurrent_gemma rwkv smollm3 stablelm starcoder2 vaultgemma xglm
"""

# No residual stream that blocks only add to; each is refused by its name.
REFUSED = "bert openai-gpt xlm reformer deepseek_v4 bart xlnet"


def taken(model: PreTrainedModel, tokens: tuple[int, ...] = (7, 11), **options: Any) -> Why:
    """Explain a tiny model, which has no tokenizer."""
    named = [Token(i, str(i)) for i in tokens]
    return explained(whole(model), IDS, len(IDS) - 1, named, **options)


def check(model: PreTrainedModel, **options: Any) -> Why:
    result = taken(model, **options)
    with torch.no_grad():
        z = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1].double()
    assert result.token_logit == pytest.approx(float(z[7]), abs=1e-12)
    assert result.logit == pytest.approx(float(z[7] - z[11]), abs=1e-12)
    # without the part that says how much is left unexplained
    parts = sum(r.value for r in result.reasons if r.kind != "rounding")
    assert abs(parts - result.logit) < WITHIN
    one = sum(r.to_token for r in result.reasons if r.kind != "rounding")
    assert abs(one - result.token_logit) < WITHIN
    assert result.total == pytest.approx(result.logit, abs=1e-9)
    assert result.reasons[0].kind == "embedding"
    return result


@pytest.mark.parametrize("name", SAMPLE.split())
def test_the_parts_add_up_and_the_lens_ends_in_the_logits(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    result = check(model)
    _, exact, logits = looked(whole(model), IDS, None, top=1)
    assert exact
    with torch.no_grad():
        assert torch.equal(logits, model(torch.tensor([IDS]), use_cache=False).logits[0])
    assert {r.block for r in result.reasons if r.block is not None} >= {0, 1}


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_cannot_be_told_apart_is_refused_by_name(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        taken(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3_text", "granite", "gptj"])
def test_a_part_is_what_really_entered_the_sum(name: str, tiny: Tiny) -> None:
    """Taken out of the stream, a part takes its share of the state with it.

    Of the last block nothing else depends on what its MLP adds, so that leaving it out by a hook
    on the module itself must leave the other parts of the state, and no more.
    """
    model = tiny(name)
    head = LMHead.from_model(model)
    whole = parts_of(TorchBody(model), head, IDS, 3)
    part = next(p for p in whole.parts if p.unit.block == 1 and p.unit.kind == "mlp")
    module = model.get_submodule(part.unit.name)
    handle = module.register_forward_hook(lambda _m, _a, out: out * 0)
    without = parts_of(TorchBody(model), head, IDS, 3)
    handle.remove()
    assert torch.allclose(whole.x - part.value, without.x, atol=1e-5)
    assert float(part.value.abs().max()) > 1e-4


def test_softcap_and_biases_are_parts_of_their_own(tiny: Tiny) -> None:
    capped = check(tiny("gemma2"))
    cap = next(r for r in capped.reasons if r.kind == "softcap")
    before = sum(r.to_token for r in capped.reasons if r.kind not in ("softcap", "rounding"))
    c = LMHead.from_model(tiny("gemma2")).softcap
    assert c == 5.0
    assert cap.to_token == pytest.approx(5 * float(torch.tensor(before / 5).tanh()) - before)
    assert abs(cap.to_token) > 1e-3

    biased = check(tiny("phi"))
    model = tiny("phi")
    assert model.lm_head.bias is not None
    bias = next(r for r in biased.reasons if r.kind == "bias")
    assert bias.to_token == pytest.approx(float(model.lm_head.bias.detach()[7]))
    assert any(r.kind == "norm" for r in biased.reasons)  # LayerNorm has a bias as well
    positions = check(tiny("gpt2")).reasons[1]
    assert positions.name == "position embedding"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "granite", "gptj", "opt"])
def test_heads_add_up_to_their_attention(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    plain, split = check(model), check(model, heads=True)
    for block in (0, 1):
        whole = next(r for r in plain.reasons if (r.block, r.kind) == (block, "attention"))
        those = [r for r in split.reasons if (r.block, r.kind) == (block, "attention")]
        assert [r.head for r in those[:4]] == [0, 1, 2, 3]
        assert sum(r.value for r in those) == pytest.approx(whole.value, abs=1e-5)
        assert len({round(r.value, 9) for r in those}) > 2


def test_a_head_that_is_silenced_takes_its_own_part_with_it(tiny: Tiny) -> None:
    model = tiny("llama")
    head = LMHead.from_model(model)
    layer = model.model.layers[1].self_attn.o_proj
    heads, rest = _split(model, head)
    n = layer.in_features // 4
    before = parts_of(TorchBody(model), head, IDS, 3)

    def silence(_module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        x[..., 2 * n : 3 * n] = 0
        return (x,)

    handle = layer.register_forward_pre_hook(silence)
    after = parts_of(TorchBody(model), head, IDS, 3)
    handle.remove()

    def attention(parts: Any) -> torch.Tensor:
        found: torch.Tensor = next(
            p.value for p in parts.parts if (p.unit.block, p.unit.kind) == (1, "attention")
        )
        return found

    assert torch.allclose(attention(before) - attention(after), heads[2], atol=1e-6)
    assert float(rest.abs().max()) < 1e-6


def _split(model: Any, head: LMHead) -> tuple[torch.Tensor, torch.Tensor]:
    from lmhead.inspect.within import split_heads

    apart = parts_of(TorchBody(model), head, IDS, 3)
    part = next(p for p in apart.parts if (p.unit.block, p.unit.kind) == (1, "attention"))
    return split_heads(part, model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "granite"])
def test_neurons_add_up_to_their_mlp(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    result = check(model, neurons=1, top=500)
    mlp = next(r for r in result.reasons if (r.block, r.kind) == (1, "mlp"))
    values = [n.value for n in result.neurons]
    assert len(values) > 30
    assert values == sorted(values, reverse=True)
    bias = 0.0
    if name == "gpt2":  # the layer's own bias is not a neuron's
        bias = mlp.value - sum(values)
        assert abs(bias) > 1e-6
    assert sum(values) + bias == pytest.approx(mlp.value, abs=1e-5)
    few = check(model, neurons=1, top=2).neurons
    assert [n.neuron for n in few] == [
        *(n.neuron for n in result.neurons[:2]),
        *(n.neuron for n in result.neurons[-2:]),
    ]


def test_experts_have_no_single_layer_of_neurons(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match="neurons cannot be told apart"):
        taken(tiny("mixtral"), neurons=0)
    with pytest.raises(BadInput, match="neurons is 7, but the model has no such block"):
        taken(tiny("llama"), neurons=7)


def test_half_precision_says_how_much_it_rounds(tiny: Tiny) -> None:
    result = taken(tiny("llama").to(torch.bfloat16))
    assert result.total == pytest.approx(result.logit, abs=1e-9)
    assert 0 < abs(result.rounding) < 0.1


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    model = load(smollm2)
    result = why("The capital of France is", model, against=" London")
    assert (result.token.text, result.against and result.against.text) == (" Paris", " London")
    assert abs(result.rounding) < WITHIN
    assert len(result.reasons) == 1 + 2 * 30 + 1
    plain = why("The capital of France is", model, token="Paris")
    z = model.head(model.last_hidden("The capital of France is")).detach()
    assert plain.logit == pytest.approx(float(z[plain.token.id]), abs=1e-4)
    assert abs(plain.rounding) < WITHIN
    best = max(result.reasons, key=lambda r: r.value)
    assert (best.block, best.kind) == (23, "attention")
    first = why("The capital of France is", model, position=0)
    assert abs(first.rounding) < WITHIN
    assert first.to_dict()["reasons"][0]["name"] == "embedding"
    assert "block 23 attention" in result._repr_html_()


@pytest.mark.gemma
def test_gemma3(gemma3: Path) -> None:
    model = load(gemma3)
    for options in ({}, {"heads": True, "against": " London"}):
        result = why("The capital of France is", model, **options)  # type: ignore[arg-type]
        assert abs(result.rounding) < WITHIN


def test_names_of_all_architectures() -> None:
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(SAMPLE.split()) >= 60
    assert {*SAMPLE.split(), *REFUSED.split()} <= names
