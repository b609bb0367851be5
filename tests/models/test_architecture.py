"""Finding the head by names and shapes, against what transformers builds."""

from typing import Any

import pytest
import torch

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.models.architecture import (
    HeadTensors,
    find_head,
    is_tied,
    require_causal,
    says_tied,
    scale,
    softcap,
    text_config,
)

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97}

# Sizes to cut down; the names of a model's matrices do not depend on them.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def small(config: Any) -> Any:
    for key in LAYERS + EXPERTS:
        if isinstance(value := getattr(config, key, None), int):
            setattr(config, key, min(value, 2 if key in LAYERS else 8))
    if isinstance(types := getattr(config, "layer_types", None), list):
        config.layer_types = types[:2]
    return config


def stored_and_true(model_type: str) -> tuple[dict[str, Any], dict[str, Any], HeadTensors]:
    """Build an architecture on the meta device: its config, the names it stores, its true head."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = small(CONFIG_MAPPING[model_type]())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names: dict[int, str] = {}
    shapes = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in names:  # a shared tensor is stored once
            names[id(tensor)] = name
            shapes[name] = tuple(tensor.shape)
    out, into = model.get_output_embeddings(), model.get_input_embeddings()
    true = HeadTensors(
        weight=names[id(out.weight)],
        bias=names.get(id(getattr(out, "bias", None))),
        embedding=names[id(into.weight)],
        tied=out.weight is into.weight,
    )
    plain: dict[str, Any] = {**config.to_dict(), "architectures": [type(model).__name__]}
    return plain, shapes, true


def test_head_is_found_in_every_causal_architecture_that_builds_by_default() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found, wrong = 0, {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config, shapes, true = stored_and_true(model_type)
        except Exception:  # defaults that do not fit together, or a package that is not here
            continue
        got = find_head(shapes, config, model_type)
        if got == true:
            found += 1
        else:
            wrong[model_type] = (got, true)
    # Its configuration says that it is tied, but its causal class does not tie.
    assert set(wrong) <= {"bigbird_pegasus"}, wrong
    assert found >= 140


def test_default_of_tying_is_that_of_transformers() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    compared, wrong = 0, []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            tied = getattr(CONFIG_MAPPING[model_type](), "tie_word_embeddings", False)
        except Exception:  # a configuration without whole defaults
            continue
        compared += 1
        if is_tied({"model_type": model_type}) != tied:
            wrong.append(model_type)
    assert wrong == []
    assert compared >= 140


@pytest.mark.parametrize(
    ("names", "tie", "expected"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], False, (0, 1, False)),
        (["lm_head.weight", "model.embed_tokens.weight"], True, (0, 1, True)),
        (["lm_head.weight", "model.embed_tokens.weight"], None, (0, 1, False)),
        (["model.embed_tokens.weight"], True, (0, 0, True)),
        (["lm_head.weight"], True, (0, 0, True)),
        (["embed_out.weight", "gpt_neox.embed_in.weight"], False, (0, 1, False)),
        (["output.weight", "tok_embeddings.weight"], False, (0, 1, False)),
        (["wte.weight"], None, (0, 0, True)),
        (
            ["language_model.lm_head.weight", "language_model.model.embed_tokens.weight"],
            False,
            (0, 1, False),
        ),
    ],
)
def test_names_that_files_use(
    names: list[str], tie: bool | None, expected: tuple[int, int, bool]
) -> None:
    config = LLAMA | ({} if tie is None else {"tie_word_embeddings": tie})
    shapes = dict.fromkeys(names, (97, 8)) | {
        "model.layers.0.mlp.up_proj.weight": (97, 8),  # as many rows, but in a layer
        "wpe.weight": (97, 8),  # as many positions as tokens
        "model.norm.weight": (8,),
    }
    head = find_head(shapes, config, "here")
    weight, embedding, tied = expected
    assert head == HeadTensors(names[weight], None, names[embedding], tied)


def test_bias_is_found() -> None:
    shapes = {
        "model.embed_tokens.weight": (97, 8),
        "lm_head.weight": (97, 8),
        "lm_head.bias": (97,),
        "model.layers.0.fc.bias": (97,),
    }
    assert find_head(shapes, LLAMA, "here").bias == "lm_head.bias"


def test_rows_that_contradict_the_configuration() -> None:
    shapes = {"model.embed_tokens.weight": (128, 8), "lm_head.weight": (128, 8)}
    with pytest.raises(BadCheckpoint, match=r"vocab_size 97, but lm_head\.weight has 128 rows"):
        find_head(shapes, LLAMA, "here")


def test_no_vocabulary_at_all() -> None:
    with pytest.raises(UnsupportedModel, match="holds no matrix of 97 rows"):
        find_head({"model.norm.weight": (8,)}, LLAMA, "here")


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "LlamaForSequenceClassification", "LlamaModel"]
)
def test_a_model_without_a_head_for_the_next_token_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"is a {name}, which has no head"):
        find_head({"embeddings.weight": (97, 8)}, LLAMA | {"architectures": [name]}, "here")


def test_an_unusual_class_with_a_head_is_accepted() -> None:
    require_causal({"architectures": ["ChatGLMModel"]}, has_head=True, where="here")


def test_nested_configuration() -> None:
    text = {"vocab_size": 97, "tie_word_embeddings": False, "final_logit_softcapping": 30.0}
    config = {"model_type": "gemma3", "text_config": text}
    assert text_config(config) is text
    assert says_tied(config) is False
    assert softcap(config) == 30.0
    # The outer word is the one that transformers obeys.
    assert is_tied(config | {"tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"logit_scale": 0.0625}, 0.0625),  # Cohere
        ({"logits_scaling": 8.0}, 0.125),  # Granite divides
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
        ({"lm_head_multiplier": 0.5}, 0.5),  # Falcon-H1
        ({"logits_scaling": 1.0}, None),
        ({"logit_scale": None}, None),
        ({}, None),
    ],
)
def test_scale_is_the_factor_on_the_logits(config: dict[str, Any], factor: float | None) -> None:
    assert scale(config) == factor
