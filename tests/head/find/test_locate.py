"""What `locate` does with the oddities of a model's end, and with models that have no head."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    MusicgenForCausalLM,
    PreTrainedModel,
)
from transformers.models.musicgen import MusicgenDecoderConfig

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.head import LMHead
from lmhead.head.find.locate import locate

Tiny = Callable[..., PreTrainedModel]


class Model(nn.Module):
    """A causal language model of one block, with a place for oddities at its end."""

    def __init__(
        self,
        after: Callable[[Tensor], Any] = lambda z: z,
        before: Callable[[Tensor], Tensor] = lambda h: h,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=bias)
        self.after, self.before = after, before

    def forward(self, input_ids: Tensor) -> Any:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h)
        z = self.after(self.out(self.before(self.norm(h))))
        return SimpleNamespace(logits=z) if isinstance(z, Tensor) else z


def capped(z: Tensor) -> Tensor:
    return 5 * torch.tanh(z.float() * 0.3 / 5)


def in_place(z: Tensor) -> Tensor:
    z *= 0.3
    z.div_(5).tanh_()
    z *= 5
    return z


def test_scale_and_softcap_together() -> None:
    head = locate(Model(capped)).head
    assert str(head.scale) == "* 0.3"
    assert head.softcap == 5.0
    assert head.logits_dtype == torch.float32
    assert head.bias is not None


def test_in_place_arithmetic_is_seen() -> None:
    head = locate(Model(in_place)).head
    assert (str(head.scale), head.softcap) == ("* 0.3", 5.0)


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        (lambda h: h / 3, ["LayerNorm", "div, 3"]),
        (lambda h: torch.relu(h.contiguous()), ["LayerNorm", "relu"]),
        (
            lambda h: nn.functional.gelu(h, approximate="tanh"),
            ["LayerNorm", "gelu, approximate=tanh"],
        ),
        (lambda h: h.double().float(), ["LayerNorm", "float64"]),
    ],
)
def test_steps_before_the_projection(before: Any, steps: list[str]) -> None:
    model = Model(before=before)
    norm = locate(model).head.norm
    assert isinstance(norm, nn.Sequential)
    reported = [type(m).__name__ if isinstance(m, nn.LayerNorm) else m.extra_repr() for m in norm]
    assert reported == steps
    h = torch.linspace(-2, 2, 12).view(2, 6)
    assert torch.equal(
        LMHead.from_model(model)(h, from_block=True), model.out(before(model.norm(h)))
    )


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (lambda z: z + 1, "projection > add > logits"),
        (lambda z: z * z, "projection > mul > logits"),
        (lambda z: z.log_softmax(-1), "projection > log_softmax > logits"),
        (lambda z: torch.tanh(z), "projection > tanh > logits"),
        (lambda z: 4 * torch.tanh(z / 5), "projection > div > tanh > mul > logits"),
        (lambda z: z * 2 * 3, "projection > mul > mul > logits"),
        (lambda z: z[..., 1:], "projection > getitem > logits"),
        (lambda z: (z * 2).double(), "projection > mul > to > logits"),
        (lambda z: torch.stack([z, z]), "projection > stack > logits"),
        (lambda z: z.index_fill(-1, torch.tensor([3]), -1e9), "projection > index_fill > logits"),
    ],
)
def test_more_than_a_head_can_say_is_refused(after: Any, found: str) -> None:
    with pytest.raises(UnsupportedModel, match=found.replace("to >", ".* >")):
        locate(Model(after))


def masked(z: Tensor) -> Tensor:
    z[..., 3] = -1e9  # returns nothing, yet changes the logits
    return z


def hidden(z: Tensor) -> Tensor:
    z.numpy()[..., 3] = -1e9  # behind torch's back
    return z


def test_what_changes_the_logits_quietly_is_noticed() -> None:
    with pytest.raises(UnsupportedModel, match="setitem"):
        locate(Model(masked))
    with pytest.raises(UnsupportedModel, match="setitem"):
        locate(Model(masked).to("meta"))
    with pytest.raises(UnsupportedModel, match="cannot be seen from outside"):
        locate(Model(hidden))


def test_a_computed_weight_is_refused() -> None:
    class Normalised(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            return nn.functional.linear(h, nn.functional.normalize(self.weight))

    model = Model()
    model.out = Normalised(6, 11)
    with pytest.raises(UnsupportedModel, match="computes the weight"):
        locate(model)


def test_an_adapter_on_the_output_layer_is_refused() -> None:
    class Adapted(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h) + h @ torch.ones(6, 11)

    model = Model()
    model.out = Adapted(6, 11)
    with pytest.raises(UnsupportedModel, match="projection > add > logits"):
        locate(model)


def test_a_mixer_is_no_norm() -> None:
    class Mixer(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.cumsum(-2)

    model = Model()
    model.norm = Mixer()
    with pytest.raises(UnsupportedModel, match="more than one position"):
        locate(model)


def test_an_unknown_step_is_refused_not_skipped() -> None:
    model = Model(before=lambda h: torch.nn.functional.normalize(h))
    with pytest.raises(UnsupportedModel, match="has normalize between"):
        locate(model)
    model = Model(before=lambda h: h.cumsum(-1))
    with pytest.raises(UnsupportedModel, match="has cumsum between"):
        locate(model)


def test_several_heads_are_refused() -> None:
    settings = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "ffn_dim": 8}
    config = MusicgenDecoderConfig(**settings, num_attention_heads=2, num_codebooks=4)
    model = MusicgenForCausalLM(config)
    with pytest.raises(UnsupportedModel, match=r"stack > reshape > logits.*one linear layer"):
        LMHead.from_model(model, input_ids=torch.zeros(4, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("auto", "name"),
    [
        (AutoModel, "llama"),
        (AutoModel, "bert"),
        (AutoModelForMaskedLM, "bert"),
        (AutoModelForSequenceClassification, "llama"),
    ],
)
def test_models_without_a_generating_head(
    auto: Any, name: str, tiny_config: Callable[..., Any]
) -> None:
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        LMHead.from_model(auto.from_config(tiny_config(name)))


def test_a_body_of_ones_own_has_no_logits() -> None:
    with pytest.raises(UnsupportedModel, match="no logits"):
        locate(Model(after=lambda z: SimpleNamespace(last_hidden_state=z)))


def test_results_without_names() -> None:
    model = Model(after=lambda z: (z / 3, torch.zeros(1)))
    assert str(LMHead.from_model(model).scale) == "/ 3"


def test_a_failing_forward_says_what_to_pass(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match=r"inputs_embeds.*pass what its forward needs"):
        LMHead.from_model(tiny("gemma4_unified_assistant"))


def test_the_model_is_left_as_it_was(tiny: Tiny) -> None:
    model = tiny("gpt2").train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    LMHead.from_model(model)
    assert [module.training for module in model.modules()] == modes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_nan_in_the_head_is_told(tiny: Tiny) -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.lm_head.weight[7, 2] = math.nan
    with pytest.raises(BadCheckpoint, match=r"weight holds 1 numbers.*row 7"):
        LMHead.from_model(model)


def test_nan_in_the_body_is_none_of_the_heads_business(tiny: Tiny) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(math.nan)
    assert LMHead.from_model(model).vocab_size == 99


def test_training_the_head_trains_the_model(tiny: Tiny) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    head = LMHead.from_model(model)
    head(torch.ones(3, 32), from_block=True).sum().backward()
    assert model.lm_head.weight.grad is not None
    assert model.model.embed_tokens.weight is head.weight
    assert model.model.norm.weight.grad is not None
