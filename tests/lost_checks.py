"""What ranks do in the tests of lost ranks and checkpoints; see `world.py`."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from lmhead.errors import LostRank
from lmhead.head import LMHead
from lmhead.head.sharded import ShardedHead
from lmhead.ranks import load_checkpoint, ranks_of, save_checkpoint
from sharded_checks import V, random, rng, uneven


def lost(group: Any, what: str, victim: int, how: str, after: float, folder: str) -> Any:
    """Ask without end, until a rank is lost; give the ranks named, the words, and when."""
    ranks = ranks_of(group)
    head = ShardedHead.from_head(LMHead(random(4096, 64).requires_grad_()), group)
    h, t = random(256, 64, seed=1).requires_grad_(), torch.arange(256)
    place = Path(folder)
    asks = {
        "loss": lambda: head.loss(h, t).backward(),
        "topk": lambda: head.topk(h, 50),
        "save": lambda: save_checkpoint(head.checkpoint(), place / "saved", group, force=True),
    }
    asks[what]()  # everybody is here
    if ranks.rank == victim:
        number = getattr(signal, how)
        threading.Timer(after, lambda: os.kill(os.getpid(), number)).start()
    try:
        while True:
            asks[what]()
    except LostRank as error:
        return error.ranks, str(error), time.time()


def late(group: Any) -> tuple[tuple[int, ...], str]:
    """One rank is alive but does not come."""
    ranks = ranks_of(group, timeout=2.0)
    ranks.meet()
    if ranks.rank == 1:
        time.sleep(5)
        return (), ""
    try:
        ranks.meet("a meeting")
    except LostRank as error:
        return error.ranks, str(error)
    raise AssertionError("nobody was missed")


def save(group: Any, folder: str) -> None:
    """Save an uneven head, and a folder that is in the way."""
    ranks = ranks_of(group)
    dense = LMHead(random(V, 16), random(V, seed=1))
    head = ShardedHead.from_head(dense, group, counts=uneven(V, ranks.size))
    save_checkpoint({"head": head.checkpoint(), "step": 7}, folder, group)


def load(group: Any, folder: str) -> None:
    """Load it on any number of ranks, split in another way."""
    empty = LMHead(torch.zeros(V, 16), torch.zeros(V))
    head = ShardedHead.from_head(empty, group)
    state = {"head": head.checkpoint(), "step": 0}
    load_checkpoint(state, folder, group)
    assert state["step"] == 7
    dense = LMHead(random(V, 16), random(V, seed=1))
    h = random(5, 16, seed=2)
    assert torch.equal(head(h), dense(h))
    assert head.sha256 == dense.sha256


def tiny(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=509, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def batch(step: int) -> Any:
    return torch.randint(509, (3, 17), generator=rng(step))


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def train_alone(steps: int) -> list[float]:
    """20 steps as transformers itself takes them."""
    model = tiny()
    optimizer, losses = optimizer_of(model), []
    for step in range(steps):
        loss = model(batch(step), labels=batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(group: Any, folder: str, first: int, stop: int) -> tuple[list[float], int]:
    """Train a tensor-parallel model with patch_loss, from a checkpoint where one is; save it."""
    import torch.distributed.checkpoint.state_dict as states
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from lmhead.patch import patch_loss

    ranks = ranks_of(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = apply_tensor_parallelism(tiny(), mesh)
    assert isinstance(model.lm_head.weight, DTensor)
    patch_loss(model)
    head = ShardedHead.from_model(model)
    assert head.vocab_size == 509
    optimizer = optimizer_of(model)
    if first:
        model_state, optim_state = states.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optim_state}
        load_checkpoint(state, folder, group)
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    losses = []
    for step in range(first, stop):
        before = ranks.received
        out = model(batch(step), labels=batch(step))
        assert out.logits.shape[1] == 0
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
        received = ranks.received - before
    if not first:
        model_state, optim_state = states.get_state_dict(model, optimizer)
        save_checkpoint({"model": model_state, "optimizer": optim_state}, folder, group)
    h = random(4, 48, seed=3)
    whole = model.lm_head.weight.full_tensor().detach()
    assert torch.equal(head.topk(h, 5).ids, LMHead(whole).topk(h, 5).ids)
    return losses, received


def command(group: Any, words: list[str]) -> tuple[int, str, str]:
    """Run a command line as torchrun would start it; give its exit code, stdout and stderr."""
    import io
    import sys

    from lmhead.cli import run

    size = ranks_of(group).size
    rank = str(ranks_of(group).rank)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there already
    out, err = sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        code = run(words)
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return code, out.getvalue(), err.getvalue()
