"""GPT-2 on MAX gives torch's hidden states, logits and tokens, on the same checkpoints."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from lmhead.body import State, TorchBody
from lmhead.errors import BadInput, MissingExtra
from lmhead.head import LMHead
from lmhead.head.max_head import MaxHead
from lmhead.models.gpt2 import GPT2Config, GPT2LMHeadModel

needs_max = pytest.mark.skipif(
    find_spec("max") is None, reason="Modular MAX is not installed (extra max)"
)
# MAX takes minutes for a graph that it has not compiled before
pytestmark = [pytest.mark.timeout(3600), pytest.mark.bare]

TINY = GPT2Config(vocab_size=97, n_positions=40, n_embd=24, n_layer=2, n_head=4)


def lively(model: torch.nn.Module) -> None:
    """Redraw all weights so that biases and norms matter, and greedy text varies."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            else:
                width = 0.5 if "wte" in name else 1.5
                p.normal_(0.0, width / p.shape[-1] ** 0.5, generator=generator)


@pytest.fixture(scope="module")
def tiny() -> "tuple[GPT2LMHeadModel, MaxBody]":  # type: ignore[name-defined] # noqa: F821
    from lmhead.body.max_body import MaxBody

    model = GPT2LMHeadModel(TINY).eval()
    lively(model)
    return model, MaxBody(model)


def test_without_max_the_error_names_the_extra_and_the_licence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "max.experimental.nn", None)
    monkeypatch.delitem(sys.modules, "lmhead.body.max_body", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install .*\[max\]'.*LicenseRef-MAX"):
        import lmhead.body.max_body  # noqa: F401


@needs_max
@torch.inference_mode()
def test_hidden_states_with_padding_and_cache(tiny) -> None:  # type: ignore[no-untyped-def]
    model, body = tiny
    ids = torch.randint(97, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    real = mask.bool()
    expected = model.transformer(ids, mask).last_hidden_state

    def close(got: torch.Tensor, first: int) -> bool:
        shown = real[:, first:]  # what padding says is of no interest
        return bool((got[shown] - expected[:, first:][shown]).abs().max() < 1e-5)

    h, out = body(ids, attention_mask=mask)
    assert h.shape == (3, 9, 24)
    assert out.past_key_values is None
    assert close(h, 0)
    # six tokens, then two more, then one
    cache = None
    for first, last in ((0, 6), (6, 8), (8, 9)):
        h, out = body(ids[:, first:last], mask[:, :last], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        assert cache.get_seq_length() == last
        assert h.shape == (3, last - first, 24)
    assert close(h, 8)


@needs_max
@torch.inference_mode()
def test_generation_loop_runs_on_it(tiny) -> None:  # type: ignore[no-untyped-def]
    model, body = tiny
    prompts = [[5, 9, 2, 40], [8], [96, 1]]
    bodies = (body, TorchBody(model))
    memories = [State.of_prompts(prompts)[1] for _ in bodies]

    def read(ids: torch.Tensor) -> float:
        ran = [b.run(ids, memory) for b, memory in zip(bodies, memories, strict=True)]
        return float((ran[0][0][:, -1] - ran[1][0][:, -1]).abs().max())

    assert read(State.of_prompts(prompts)[0]) < 1e-5
    for memory in memories:
        memory.select([2, 0])  # one sequence has ended
        memory.select([1, 1])
    for ids in ([[7], [30]], [[0], [0]]):
        assert read(torch.tensor(ids)) < 1e-5


@needs_max
def test_wrong_inputs_are_refused(tiny) -> None:  # type: ignore[no-untyped-def]
    _, body = tiny
    with pytest.raises(BadInput, match=r"41 tokens.*at most 40"):
        body(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(BadInput, match="input_ids holds 97; expected numbers from 0 to 96"):
        body(torch.tensor([[5, 97]]))
    with pytest.raises(BadInput, match="holds -1"):
        body(torch.tensor([[5, -1]]))
    with pytest.raises(BadInput, match="position_ids holds 40"):
        body(torch.tensor([[5]]), position_ids=torch.tensor([[40]]))
    with pytest.raises(BadInput, match=r"\[1, 3\]; expected \[1, 2\]"):
        body(torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 3))


@needs_max
def test_full_size_gpt2_agrees_with_torch(tmp_path: Path) -> None:
    from lmhead.body.max_body import MaxBody

    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    lively(theirs)
    assert sum(p.numel() for p in theirs.parameters()) == 124_439_808
    theirs.save_pretrained(tmp_path)
    body = MaxBody.from_pretrained(tmp_path)
    head = MaxHead.from_head(LMHead.from_pretrained(tmp_path))

    ids = torch.randint(50_257, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids).logits
        got = head(body(ids)[0])
    assert (got - expected).abs().max() < 1e-3
    assert expected.std() > 0.1  # else any logits would be close

    continued = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=32,
        min_new_tokens=32,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[:, 9:]
    assert len({*continued[0].tolist()}) > 3  # else any continuation would be the same
    new, cache, drawn = ids, None, []
    with torch.inference_mode():
        for _ in range(32):
            h, out = body(new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            new = head.topk(h[:, -1], 1).ids
            drawn.append(new)
    assert torch.equal(torch.cat(drawn, 1), continued)
