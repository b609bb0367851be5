"""Steering per request: each with its own vectors and guard, beside others in one batch."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Live, Settings, serving

from lmhead.loading import Model
from lmhead.steer import SteeringVector
from lmhead.steer.bound.certificate import certify
from lmhead.steer.control import save_control_vector

pytestmark = pytest.mark.model
PROMPTS = ("Once upon a time", "The capital of France is", "def f(x):", "In the beginning")


def ask(live: Live, **body: Any) -> dict[str, Any]:
    reply = live.post("/v1/completions", {"max_tokens": 12, "seed": 5, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def test_a_steered_request_tells_what_became_of_it(live: Live) -> None:
    plain = ask(live, prompt=PROMPTS[0])
    assert "steering" not in plain
    free = ask(live, prompt=PROMPTS[0], steering=[{"name": "v1", "alpha": 8}])
    held = ask(live, prompt=PROMPTS[0], steering=[{"name": "v1", "alpha": 8, "kl_cap": 0.05}])
    assert free["text"] != plain["text"]
    assert free["steering"]["tokens"] == held["steering"]["tokens"] == 12
    assert free["steering"]["held_back"] == 0
    assert free["steering"]["max_kl"] > 0.05 >= held["steering"]["max_kl"]
    assert held["steering"]["held_back"] > 0
    assert len(held["steering"]["kl"]) == 12
    assert held["steering"]["vectors"] == [
        {"name": "v1", "alpha": 8.0, "budget": None, "kl_cap": 0.05}
    ]
    both = ask(
        live,
        prompt=PROMPTS[0],
        steering=[{"name": "v1", "kl_cap": 0.2}, {"name": "v0", "kl_cap": 0.1, "budget": 3}],
    )
    assert both["steering"]["kl_cap"] == 0.1
    assert both["steering"]["budget"] == 3


def test_a_budget_at_the_head_is_certified(live: Live) -> None:
    held = ask(live, prompt=PROMPTS[1], steering=[{"name": "v0", "alpha": 50, "budget": 1.5}])
    assert held["steering"]["max_range"] <= 1.5 + 1e-4
    chat = live.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
            "steering": [{"name": "v0", "budget": 1.0}],
        },
    ).json()["choices"][0]
    assert chat["steering"]["tokens"] == 4


def test_each_request_of_a_batch_has_its_own_steering(live: Live) -> None:
    bodies = [
        {
            "prompt": PROMPTS[i % 4],
            "seed": i,
            "temperature": 0.9,
            **({} if i % 3 == 0 else {"steering": [
                {"name": f"v{i % 4}", "alpha": 2.0 + i, "kl_cap": 0.1 * (1 + i % 2)}
            ]}),
        }
        for i in range(16)
    ]  # fmt: skip
    alone = [ask(live, **body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: ask(live, **body), bodies))
    assert [t["text"] for t in together] == [t["text"] for t in alone]
    for one, other, body in zip(together, alone, bodies, strict=True):
        if "steering" in body:
            assert one["steering"]["kl"] == pytest.approx(other["steering"]["kl"], abs=1e-4)
            assert one["steering"]["max_kl"] <= body["steering"][0]["kl_cap"]


def test_steered_prompts_are_scored_as_they_are_steered(live: Live) -> None:
    ids = live.model.encode(PROMPTS[1])
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    plain = ask(live, **asked)["logprobs"]["token_logprobs"]
    reported = ask(live, **asked, steering=[{"name": "v0", "alpha": 3}])["logprobs"][
        "token_logprobs"
    ]
    v = live.server.vectors.get("v0").vectors[0]
    with torch.inference_mode():
        h, _ = live.model.body(torch.tensor([ids]), use_cache=False)
        z = torch.log_softmax(live.model.head(h[0] + 3 * v.direction), -1)
    expected = [float(z[t - 1, ids[t]]) for t in range(1, len(ids))]
    assert reported[1:-1] == pytest.approx(expected, abs=1e-3)
    assert plain[1:-1] != pytest.approx(expected, abs=1e-3)


def test_vectors_are_uploaded_certified_used_and_deleted(
    tiny_served: Model, tmp_path: Path
) -> None:
    d = tiny_served.head.hidden_size
    kept = tmp_path / "kept"
    kept.mkdir()
    direction = torch.randn(d, generator=torch.Generator().manual_seed(9))
    at_head = SteeringVector(direction, "head", 2.0)
    content = at_head.save(tmp_path / "x.safetensors").read_bytes()
    gguf = save_control_vector(SteeringVector(direction, 1, 1.0), tmp_path / "x.gguf").read_bytes()
    with serving(tiny_served, Settings(vectors=kept, max_vectors=2, drain=5)) as other:

        def put(name: str, body: bytes) -> Any:
            import httpx

            return httpx.put(f"{other.url}/v1/steering/{name}", content=body, timeout=60)

        made = put("mine", content)
        assert made.status_code == 201
        expected = certify(tiny_served, at_head)
        assert made.json()["certificate"]["range"] == pytest.approx(expected.range)
        assert put("mine", content).status_code == 409
        block = put("block", gguf)
        assert block.status_code == 201
        assert block.json()["certificate"] is None
        assert block.json()["layers"] == [1]
        assert put("third", content).status_code == 409, "there is room for two"
        listed = other.get("/v1/steering").json()["data"]
        assert [one["name"] for one in listed] == ["block", "mine"]
        assert sorted(p.name for p in kept.iterdir()) == ["block.gguf", "mine.safetensors"]
        steered = ask(other, prompt="x", steering=[{"name": "block", "kl_cap": 0.3}])
        assert steered["steering"]["max_kl"] <= 0.3
        import httpx

        assert httpx.delete(f"{other.url}/v1/steering/block").json()["deleted"]
        assert httpx.delete(f"{other.url}/v1/steering/block").status_code == 404
        assert not (kept / "block.gguf").exists()
        gone = other.post("/v1/completions", {"prompt": "x", "steering": [{"name": "block"}]})
        assert gone.status_code == 404
        for name, body in (
            ("junk", b"junk"),
            ("junk", b"GGUF" + b"\0" * 100),
            ("wide", SteeringVector(torch.ones(d + 1), "head", 1.0).save(
                tmp_path / "wide.safetensors").read_bytes()),
            ("cut", content[:-7]),
            ("empty", b""),
            ("..", content),
            ("a b", content),
        ):  # fmt: skip
            refused = put(name, body)
            assert refused.status_code in (400, 404, 405), (name, refused.text)
            assert str(tmp_path) not in refused.text
            assert "/tmp" not in refused.text
    with serving(tiny_served, Settings(vectors=kept, drain=5)) as again:
        assert [one["name"] for one in again.get("/v1/steering").json()["data"]] == ["mine"]
