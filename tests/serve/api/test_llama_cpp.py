"""A server whose blocks llama.cpp runs: the same answers, steering and scores as in the process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Live, Settings, serving

from lmhead.body.llama.library import is_installed
from lmhead.generation import generate, score_text
from lmhead.loading import Model, load
from lmhead.steer import SteeringVector
from tiny_gguf import llama, merged_vocabulary, randomise, write_gguf

if not is_installed():
    pytest.skip(
        "llama-cpp-python is not installed; `make test-llamacpp` builds it", allow_module_level=True
    )

PROMPTS = ("abc", "the cat", "a b c d", "hello")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = randomise(llama(max_position_embeddings=600, num_hidden_layers=4))
    folder = tmp_path_factory.mktemp("served")
    return write_gguf(folder / "tiny.gguf", "llama", net, tokenizer=merged_vocabulary)


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMHEAD_CACHE", str(file.parent / "cache"))
        yield load(file, body="llama.cpp")


@pytest.fixture(scope="module")
def live(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("vectors")
    for name, layer in (("head", "head"), ("block", 2)):
        direction = torch.randn(64, generator=torch.Generator().manual_seed(len(name)))
        SteeringVector(direction, layer, 1.0).save(folder / f"{name}.safetensors")
    with serving(model, Settings(vectors=folder, drain=5), batch_size=8) as running:
        yield running


def ask(live: Live, **body: Any) -> dict[str, Any]:
    reply = live.post("/v1/completions", {"max_tokens": 12, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0])


def test_completions_and_scores_are_those_of_the_process(live: Live) -> None:
    for prompt in PROMPTS:
        wanted = generate(prompt, live.model, max_tokens=12)[0].text
        assert ask(live, prompt=prompt)["text"] == wanted
    reported = ask(live, prompt="the cat", max_tokens=0, echo=True, logprobs=0)["logprobs"]
    scored = score_text("the cat", live.model)[0].logprobs
    assert reported["token_logprobs"][1:] == pytest.approx(list(scored)[1:], abs=1e-4)


def test_guarded_requests_fill_the_batch_and_others_are_answered_meanwhile(live: Live) -> None:
    """Eight guarded sequences have two rows each; scores need rows beside them."""
    steering = [{"name": "block", "alpha": 6, "kl_cap": 0.05}]
    alone = [ask(live, prompt=p, steering=steering, max_tokens=60) for p in PROMPTS * 2]
    assert {one["steering"]["held_back"] > 0 for one in alone} == {True}
    with ThreadPoolExecutor(12) as pool:
        many = [
            pool.submit(ask, live, prompt=p, steering=steering, max_tokens=60) for p in PROMPTS * 2
        ]
        scored = [
            pool.submit(live.post, "/v1/completions",
                        {"prompt": list(PROMPTS) * 3, "max_tokens": 0, "echo": True, "logprobs": 0})
            for _ in range(3)
        ]  # fmt: skip
        assert [one.result()["text"] for one in many] == [one["text"] for one in alone]
        assert {one.result().status_code for one in scored} == {200}


def test_a_vector_at_block_0_is_refused_when_it_comes(live: Live, tmp_path: Path) -> None:
    SteeringVector(torch.ones(64), 0, 1.0).save(tmp_path / "zero.safetensors")
    content = (tmp_path / "zero.safetensors").read_bytes()
    reply = httpx.put(f"{live.url}/v1/steering/zero", content=content, timeout=60)
    assert reply.status_code == 400, reply.text
    assert "llama.cpp adds no vector at block 0" in reply.json()["error"]["message"]


def test_the_command_takes_it_for_a_gguf_file(file: Path) -> None:
    env = {**os.environ, "LMHEAD_CACHE": str(file.parent / "cache")}
    env.pop("PYTHONUNBUFFERED", None)  # its address comes through a pipe all the same
    command = [sys.executable, "-m", "lmhead", "serve", "-m", str(file), "--port", "0", "--json"]
    said = {}
    for body in ("auto", "llama.cpp", "torch"):
        with subprocess.Popen(
            [*command, "--body", body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env,
        ) as it:  # fmt: skip
            assert it.stdout is not None
            try:
                reported = ""
                while not reported.endswith("}\n"):
                    reported += (line := it.stdout.readline())
                    assert line, "the server did not start"
                url = json.loads(reported)["url"]
                asked = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
                reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
                it.send_signal(signal.SIGTERM)
                said[body] = reply.json()["choices"][0]["text"], it.communicate(timeout=60)[1]
            finally:
                it.kill()
    assert len({text for text, _ in said.values()}) == 1
    assert "body: llama.cpp" in said["auto"][1]
    assert "body: llama.cpp" not in said["torch"][1]
