"""Our GPT-2 gives transformers' logits and tokens, and the two read each other's files."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from lmhead.body import TorchBody
from lmhead.errors import BadCheckpoint, BadInput, UnsupportedModel
from lmhead.generation import generate, next_tokens
from lmhead.head import LMHead
from lmhead.loading import Model, load
from lmhead.models.gpt2 import GPT2Config, GPT2LMHeadModel

TINY = GPT2Config(vocab_size=97, n_positions=40, n_embd=24, n_layer=3, n_head=4)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lively(model: torch.nn.Module, seed: int = 0) -> None:
    """Redraw all weights so that biases and norms matter, and greedy text varies.

    Tied embeddings must be small beside what the blocks add, or every token repeats itself.
    """
    generator = draw(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            else:
                width = 0.5 if "wte" in name else 1.5
                p.normal_(0.0, width / p.shape[-1] ** 0.5, generator=generator)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 written by transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=40,
        n_embd=24,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(config)
    lively(theirs)
    theirs.save_pretrained(folder)
    return folder


def load_theirs(folder: Path) -> transformers.GPT2LMHeadModel:
    model, report = transformers.GPT2LMHeadModel.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Make ids and attention mask of one width, [B, T] each."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def greedy(model: GPT2LMHeadModel, prompts: list[list[int]], steps: int, cached: bool) -> Tensor:
    """Continue prompts, padded at the left, by the best token each time: ids [B, steps]."""
    ids, mask = left_padded(prompts)
    start, cache, new = ids.shape[1], None, ids
    with torch.inference_mode():
        for _ in range(steps):
            read = new if cached else ids
            h, cache = model.transformer(read, mask, past_key_values=cache, use_cache=cached)
            new = model.lm_head(h[:, -1]).argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
            mask = torch.cat([mask, torch.ones_like(new)], 1)
    return ids[:, start:]


def their_greedy(model: Any, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Continue prompts by transformers' own generation."""
    ids, mask = left_padded(prompts)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[:, ids.shape[1] :].tolist()


def check_against_transformers(folder: Path, prompts: list[list[int]], steps: int) -> None:
    ours, theirs = GPT2LMHeadModel.from_pretrained(folder), load_theirs(folder)
    ids = torch.tensor([prompts[0], prompts[0][::-1]])
    with torch.inference_mode():
        expected, got = theirs(ids).logits, ours(ids).logits
    assert (got - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # else any logits would be close
    continued = their_greedy(theirs, prompts, steps)
    assert len({*continued[0]}) > 3  # and any continuation the same
    for batch in (prompts[:1], prompts):
        for cached in (True, False):
            assert greedy(ours, batch, steps, cached).tolist() == continued[: len(batch)]


def test_tiny_gpt2_agrees_with_transformers(tiny: Path) -> None:
    check_against_transformers(tiny, [[5, 9, 2, 40, 7], [8], [3, 3, 3], [96, 1, 50, 2]], 30)


def test_full_size_gpt2_agrees_with_transformers(tmp_path: Path) -> None:
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    lively(theirs)
    assert sum(p.numel() for p in theirs.parameters()) == 124_439_808
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(50_257, (4, 9), generator=draw(1)).tolist()
    prompts = [row[: 9 - 2 * i] for i, row in enumerate(ids)]
    check_against_transformers(tmp_path / "theirs", prompts, 64)

    GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    back = load_theirs(tmp_path / "ours").state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, back[name]), name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_named_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config.named(name))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(BadInput, match=r"gpt2-huge.*gpt2-xl"):
        GPT2Config.named("gpt2-huge")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_and_read_again_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = GPT2LMHeadModel(replace(TINY, tie_word_embeddings=False), draw()).to(dtype)
    ours.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    theirs = load_theirs(tmp_path)
    assert again.config == ours.config
    assert theirs.dtype == dtype
    for name, p in ours.named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name
        other = theirs.get_parameter(name)
        in_block = ".h." in name and p.ndim == 2  # transformers' Conv1D holds [in, out]
        assert torch.equal(p, other.T if in_block else other), name
    again.save_pretrained(tmp_path / "twice")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    assert {p.name for p in (tmp_path / "twice").iterdir()} == {"config.json", "model.safetensors"}


def test_reads_the_oldest_layout(tiny: Path, tmp_path: Path) -> None:
    """No prefix, and causal masks stored as if they were weights."""
    old = {
        n.removeprefix("transformer."): t for n, t in load_file(tiny / "model.safetensors").items()
    }
    old["h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    new, got = (GPT2LMHeadModel.from_pretrained(folder) for folder in (tiny, tmp_path))
    for name, p in new.named_parameters():
        assert torch.equal(p, got.get_parameter(name))


def test_a_damaged_folder_is_named(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())

    def read(tensors: dict[str, Tensor], **change: Any) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        GPT2LMHeadModel.from_pretrained(tmp_path)

    read(tensors)
    with pytest.raises(BadCheckpoint, match=r"lacks 12 of the 52 tensors .*h\.3\.attn"):
        read(tensors, n_layer=4)
    with pytest.raises(BadCheckpoint, match=r"wpe.weight .* \[40, 24\]; expected \[80, 24\]"):
        read(tensors, n_positions=80)
    with pytest.raises(UnsupportedModel, match="'llama'"):
        read(tensors, model_type="llama")
    with pytest.raises(UnsupportedModel, match="scale_attn_by_inverse_layer_idx"):
        read(tensors, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UnsupportedModel, match="'silu'"):
        read(tensors, activation_function="silu")
    with pytest.raises(BadInput, match="n_head 5"):
        read(tensors, n_head=5)


def test_the_cache_and_padding_change_nothing() -> None:
    model = GPT2LMHeadModel(TINY, draw()).eval()
    lively(model)
    ids = torch.randint(97, (2, 12), generator=draw(2))
    with torch.inference_mode():
        whole = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        rest = model(ids[:, 5:], past_key_values=first.past_key_values)  # several tokens at once
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)
        for left in (True, False):
            pad, zeros = torch.full((2, 4), 96), torch.zeros(2, 4, dtype=torch.long)
            parts, masks = [pad, ids], [zeros, torch.ones_like(ids)]
            order = 1 if left else -1
            out = model(torch.cat(parts[::order], 1), torch.cat(masks[::order], 1)).logits
            torch.testing.assert_close(out[:, 4:] if left else out[:, :-4], whole)
            assert out.isfinite().all()


def test_too_long_and_a_wrong_mask_are_named() -> None:
    model = GPT2LMHeadModel(TINY, draw())
    with pytest.raises(BadInput, match="41 tokens, but this GPT-2 reads at most 40"):
        model(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(BadInput, match=r"shape \[1, 3\]; expected \[1, 4\]"):
        model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3))


def test_a_seed_gives_the_same_weights_and_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    a, b, c = (GPT2LMHeadModel(TINY, draw(seed)) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.transformer.h[0].mlp.c_proj.weight.std() < a.transformer.h[0].mlp.c_fc.weight.std()


def test_dropout_acts_in_training_only() -> None:
    model = GPT2LMHeadModel(TINY, draw())
    ids = torch.zeros(1, 6, dtype=torch.long)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_its_head_is_found_like_any_other() -> None:
    model = GPT2LMHeadModel(TINY, draw()).eval()
    head = LMHead.from_model(model)
    assert head.tied
    assert head.weight is model.transformer.wte.weight
    assert head.norm is model.transformer.ln_f
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        h = model.transformer(ids).last_hidden_state
        assert torch.equal(head(h), model(ids).logits)


def test_generation_treats_it_like_any_other_model(tmp_path: Path) -> None:
    """Greedy, sampled, padded, ended early and by beams: as with transformers' GPT-2."""
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(alphabet[:1])
    ours = GPT2LMHeadModel(replace(TINY, vocab_size=257, bos_token_id=0, eos_token_id=0), draw())
    lively(ours)
    ours.eval().save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": alphabet[0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))

    theirs = load(tmp_path)
    mine = Model("ours", tmp_path, TorchBody(ours), LMHead.from_model(ours), theirs.tokenizer)
    prompts = ["Hello, world", "x", "one two"]
    for options in ({}, {"beams": 3}, {"temperature": 2.0, "seed": 1, "stop": ["e", "a", "t"]}):
        a, b = (generate(prompts, m, max_tokens=20, **options) for m in (mine, theirs))
        assert [g.ids for g in a] == [g.ids for g in b]
    assert len({len(g.ids) for g in a}) > 1  # the last ones ended at different steps
    first, second = (next_tokens("Hello", m).tokens for m in (mine, theirs))
    assert [t.id for t in first] == [t.id for t in second]


def test_reads_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    ours = GPT2LMHeadModel(replace(TINY, bos_token_id=0, eos_token_id=0), draw())
    lively(ours)
    file = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gpt2")
    file.add_block_count(TINY.n_layer)
    file.add_context_length(TINY.n_positions)
    file.add_embedding_length(TINY.n_embd)
    file.add_head_count(TINY.n_head)
    file.add_feed_forward_length(4 * TINY.n_embd)
    file.add_layer_norm_eps(TINY.layer_norm_epsilon)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(["<|endoftext|>", *(chr(33 + i) for i in range(TINY.vocab_size - 1))])
    file.add_token_types([3] + [1] * (TINY.vocab_size - 1))
    file.add_token_merges([])
    file.add_bos_token_id(0)
    file.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, TINY.n_layer)
    for name, p in ours.named_parameters():  # GGUF holds [out, in], as torch's Linear does
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        file.add_tensor(target, np.ascontiguousarray(p.detach().numpy()))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    got = GPT2LMHeadModel.from_pretrained(tmp_path / "tiny.gguf")
    for name, p in ours.named_parameters():
        assert torch.equal(p, got.get_parameter(name)), name


def test_it_needs_no_transformers() -> None:
    code = (
        "import sys, torch; from lmhead.models.gpt2 import *; "
        "GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
