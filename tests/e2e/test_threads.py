"""One model, nine threads: eight generate with settings of their own, the ninth computes a loss.

Everybody's result is that of a run alone. On a model whose `forward` is swapped while somebody
else runs it, texts differ or shapes do not fit within the first round.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from lmhead import generate, load, patch_loss, unpatch_loss
from lmhead.generation.engines import engine
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector, guard, steer_model

V, D = 512, 32
PROMPT = "The capital of France is"


def tiny() -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    net = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    vocab = {"<eos>": 0, **{chr(31 + i): i for i in range(1, V)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return load(net, tokenizer=fast)


def jobs_of(model: Model, tokens: int) -> dict[str, Callable[[], object]]:
    """Return nine things to do with one model; each gives something that can be compared."""
    d = model.head.hidden_size
    v = torch.randn(d, generator=torch.Generator().manual_seed(1))
    length = float(model.last_hidden(PROMPT).norm())
    at_block = SteeringVector(v, 1, alpha=0.3 * length / float(v.norm()))
    at_head = SteeringVector(v, HEAD, alpha=0.3 * length / float(v.norm()))
    screened = engine(model, "screened")  # one copy of the head, shared as well
    drawn: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 7}

    def text(model: Model, **options: Any) -> Callable[[], object]:
        def run() -> object:
            made = generate([PROMPT, "Once"], model, max_tokens=tokens, **options)
            return [(one.text, one.ids) for one in made]

        return run

    def loss() -> object:
        ids = torch.tensor([model.encode(PROMPT)])
        found = model.body.model(ids, labels=ids)
        assert found.logits.shape[1] == 0  # the patched loss: no logits
        first = model.body.model.get_input_embeddings().weight
        (grad,) = torch.autograd.grad(found.loss, first)
        return float(found.loss.detach()), float(grad.double().norm())

    return {
        "dense": text(model),
        "dense, drawn": text(model, **drawn),
        "screened": text(model, head=screened),
        "screened, drawn": text(model, head=screened, **drawn),
        "steered at a block": text(steer_model(model, at_block)),
        "steered at the head, drawn": text(steer_model(model, at_head), **drawn),
        "guarded": text(guard(model, at_block, kl_cap=0.5).model),
        "guarded at the head": text(guard(model, at_head, budget=4.0).model),
        "patched loss": loss,
    }


def at_once(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[object]]:
    """Run every job in a thread of its own, again and again; an error is a result as well."""
    found: dict[str, list[object]] = {name: [] for name in jobs}
    start = threading.Barrier(len(jobs))

    def work(name: str) -> None:
        start.wait()
        for _ in range(rounds):
            try:
                found[name].append(jobs[name]())
            except Exception as error:
                found[name].append(repr(error))

    threads = [threading.Thread(target=work, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check(model: Model, tokens: int, rounds: int) -> None:
    patch_loss(model.body.model)
    try:
        jobs = jobs_of(model, tokens)
        alone = {name: at_once({name: job}, 1)[name][0] for name, job in jobs.items()}
        for name in ("dense, drawn", "steered at a block", "steered at the head, drawn"):
            assert alone[name] != alone["dense"]  # the settings do something
        assert alone["dense"] == alone["screened"]
        assert not any(isinstance(result, str) for result in alone.values()), alone
        together = at_once(jobs, rounds)
    finally:
        unpatch_loss(model.body.model)
    assert together == {name: [result] * rounds for name, result in alone.items()}


def test_nine_threads_share_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))  # where the screen of a model in memory goes
    check(tiny(), tokens=12, rounds=5)


def test_nine_threads_share_the_real_model(smollm2: Path) -> None:
    check(load(smollm2), tokens=6, rounds=1)
