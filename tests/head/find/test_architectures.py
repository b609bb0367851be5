"""The head of every causal language model that transformers has, bit by bit.

Each architecture is built tiny and random, with norms and biases that matter. What enters its
output layer and what leaves its last block is caught with hooks, without any help from the code
under test, and the head must make the model's own logits of both.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.errors import UnsupportedModel
from lmhead.head import LMHead
from lmhead.head.find.locate import locate, output_layer

NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# How many of them are built and compared here, at least.
BUILT = 180

UNBUILDABLE: dict[str, tuple[type[Exception], str]] = {
    "gemma3n": (ImportError, "its vision tower needs timm; gemma3n_text has the same head"),
    "musicgen": (AttributeError, "AutoModelForCausalLM itself fails on its configuration"),
    "musicgen_melody": (AttributeError, "AutoModelForCausalLM itself fails on its configuration"),
}

# Where the last block is not followed by the norm alone: the state is caught as it enters the norm.
JOINED_AFTER_THE_BLOCKS = {
    "deepseek_v4": "parallel streams are joined into one",
    "gemma3n_text": "parallel streams are projected and averaged",
    "hy_v4": "parallel streams are joined into one",
    "prophetnet": "the streams of the n-grams are taken apart",
    "reformer": "the two halves of the reversible layers are put together",
    "xlm": "padding is masked out",
}

# What cannot be watched without data, so that from_pretrained refuses it.
NEEDS_DATA = {
    "blt": "cuts the bytes into patches by their entropy",
    "gemma4_assistant": "continues the work of another model",
    "gemma4_unified_assistant": "continues the work of another model",
}

Tiny = Callable[..., PreTrainedModel]


def inputs_of(model: PreTrainedModel) -> dict[str, Any]:
    """Give four tokens to a model; an assistant continues the work of another model instead."""
    if not hasattr(model, "pre_projection"):
        return {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    layers = model.model.layers
    states = {
        layer.self_attn.layer_type: (torch.ones(1, 2, 4, layer.self_attn.head_dim),) * 2
        for layer in layers
    }
    width = model.pre_projection.in_features
    embeds = torch.linspace(-1, 1, 4 * width).view(1, 4, width)
    return {"inputs_embeds": embeds, "shared_kv_states": states}


class Caught:
    """What a model did on some input, seen through hooks."""

    def __init__(self, model: PreTrainedModel, norm: nn.Module | None, **inputs: Any) -> None:
        self.entered: Tensor | None = None  # the output layer
        self.left: Tensor | None = None  # the last block, before the output layer was called
        self.unnormed: Tensor | None = None  # what entered the norm
        blocks = {b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m}
        handles = [block.register_forward_hook(self._leave) for block in blocks]
        layer = model.get_output_embeddings()
        handles.append(layer.register_forward_pre_hook(self._enter))
        if norm is not None:
            first = norm[0] if isinstance(norm, nn.Sequential) else norm
            handles.append(first.register_forward_pre_hook(self._enter_norm))
        with torch.no_grad():
            self.logits: Tensor = model(**inputs, use_cache=False).logits
        for handle in handles:
            handle.remove()

    def _leave(self, _block: nn.Module, _args: Any, result: Any) -> None:
        if self.entered is None:
            self.left = result if isinstance(result, Tensor) else result[0]

    def _enter(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.entered = args[0]

    def _enter_norm(self, _norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.unnormed = args[0]


def same_rows(h: Tensor, logits: Tensor) -> Tensor:
    """Bring states into the order of the logits: some models put the batch second, or a prompt
    of their own before the text."""
    rows = logits.shape[:-1].numel()
    return h.reshape(-1, h.shape[-1])[-rows:].view(*logits.shape[:-1], h.shape[-1])


def check(model: PreTrainedModel, name: str) -> LMHead:
    inputs = inputs_of(model)
    head = LMHead.from_model(model, **inputs)
    caught = Caught(model, head.norm, **inputs)
    logits = caught.logits
    assert caught.entered is not None
    assert logits.isfinite().all()

    z = head(caught.entered)
    if name == "prophetnet":
        z = z[:, 0]  # the model returns the first of its streams
    assert z.dtype == logits.dtype
    assert torch.equal(z, logits)

    h = caught.unnormed if name in JOINED_AFTER_THE_BLOCKS else caught.left
    if h is not None and name != "prophetnet":
        assert torch.equal(head(same_rows(h, logits), from_block=True), logits)
    return head


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNBUILDABLE])
def test_head_is_bit_equal(
    name: str, tiny: Tiny, tiny_config: Callable[..., PretrainedConfig]
) -> None:
    model = tiny(name)
    head = check(model, name)

    layer = model.get_output_embeddings()
    assert output_layer(model) is layer
    assert head.weight.data_ptr() == layer.weight.data_ptr()
    assert head.tied == (layer.weight is model.get_input_embeddings().weight)

    with torch.device("meta"):
        config = tiny_config(name)
        twin = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to("meta")
    if name in NEEDS_DATA:
        with pytest.raises(UnsupportedModel, match="load the whole model"):
            locate(twin)
    else:
        real, empty = locate(model), locate(twin)
        assert repr(empty.head) == repr(real.head)
        assert empty.layer_name == real.layer_name
        assert empty.norm_names == real.norm_names


@pytest.mark.parametrize("name", UNBUILDABLE)
def test_what_cannot_be_built_still_cannot(name: str, tiny: Tiny) -> None:
    error, _reason = UNBUILDABLE[name]
    if error is ImportError and find_spec("timm"):
        pytest.skip("timm is installed")
    with pytest.raises(error):
        tiny(name)


def test_as_many_architectures_as_stated() -> None:
    assert len(NAMES) - len(UNBUILDABLE) >= BUILT
    assert set(UNBUILDABLE) <= set(NAMES)
    assert set(JOINED_AFTER_THE_BLOCKS) <= set(NAMES)


HALF = "beam blt cohere falcon_h1 gemma2 gemma3_text granite gpt2 hy_v4 inkling_text mamba"
HALF += " mllama nemotron_h opt recurrent_gemma roberta zaya"


@pytest.mark.parametrize("name", HALF.split())
def test_bfloat16(name: str, tiny: Tiny) -> None:
    """Where a model casts its logits, and where it does not, shows only in half precision."""
    check(tiny(name).to(torch.bfloat16), name)


@pytest.mark.parametrize("before", [True, False])
def test_opt_projected(before: bool, tiny: Tiny) -> None:
    head = check(tiny("opt", do_layer_norm_before=before), "opt")
    assert (head.state_size, head.hidden_size) == (32, 24)


def test_granite_divides_and_hyperclovax_multiplies(tiny: Tiny) -> None:
    # 3 is no power of two, so x / 3 and x * (1 / 3) differ in their bits.
    assert str(check(tiny("granite"), "granite").scale) == "/ 3"
    assert str(check(tiny("hyperclovax"), "hyperclovax").scale) == "* 3"
