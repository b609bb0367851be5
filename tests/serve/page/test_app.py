"""The page's server without a browser: who is let in, and what it answers."""

import base64
import http.client
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from lmhead import next_tokens
from lmhead.steer import SteeringVector

pytestmark = pytest.mark.model
FRANCE = "The capital of France is"


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def result(self) -> Any:
        """The last of several lines."""
        return json.loads(self.body.splitlines()[-1])["result"]


def ask(site: Any, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=300)
    own = {"Host": f"localhost:{site.port}", "Content-Type": "application/json", **(headers or {})}
    method = "GET" if body is None else "POST"
    raw = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, raw, own)
    answer = Answer(connection.getresponse())
    connection.close()
    return answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8400"},
        {"Host": "localhost.evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_foreign_pages_are_turned_away(site: Any, headers: dict[str, str]) -> None:
    for path, body in (("/api/model", None), ("/api/read", {"prompt": "x"})):
        answer = ask(site, path, body, headers)
        assert answer.status == 403
        assert "error" in answer.json


def test_our_own_page_is_let_in_and_its_headers_hold(site: Any) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]"):
        own = f"{host}:{site.port}"
        headers = {"Host": own, "Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}
        answer = ask(site, "/", None, headers)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'")
        assert "unsafe" not in policy
    first = ask(site, "/api/alive").headers["X-Lmhead-Server"]
    assert first == ask(site, "/api/model").headers["X-Lmhead-Server"]
    page = ask(site, "/").body.decode()
    assert "style=" not in page
    assert "<style" not in page
    assert "http" not in page  # nothing from elsewhere


def test_all_logits_come_as_they_are(site: Any, model: Any) -> None:
    read = ask(site, "/api/read", {"prompt": FRANCE, "more": [], "chat": False, "cut": None}).json
    assert read["ids"] == model.encode(FRANCE)
    z = np.frombuffer(ask(site, "/api/logits", {"ids": read["ids"]}).body, np.float32)
    with torch.inference_mode():
        own = model.head(model.last_hidden(FRANCE))[: model.reachable].float()
    assert np.array_equal(z, own.numpy())
    best = next_tokens(FRANCE, model, top=1).tokens[0]
    assert int(z.argmax()) == best.id
    last = read["tokens"][-1]
    before = next_tokens("The capital of France", model, top=6)
    assert [i for i, _, _ in last["top"]] == [t.id for t in before.tokens]
    assert last["rank"] == 1 + [t.id for t in before.tokens].index(last["id"])


def test_token_texts_are_the_models_own(site: Any, model: Any) -> None:
    texts = ask(site, "/api/tokens").json
    assert len(texts) == model.reachable
    some = [*range(300), *range(300, model.reachable, 997)]
    assert [texts[i] for i in some] == [model.token_text(i) for i in some]


@pytest.mark.parametrize("at", [2, 4, 6, 7])
def test_going_on_from_a_token_gives_these_very_ids(site: Any, model: Any, at: int) -> None:
    more = model.encode(" Paris, of course")
    ids = [*model.encode(FRANCE), *more]
    asked = {"prompt": FRANCE, "more": more, "chat": False, "cut": [at, 4649]}
    read = ask(site, "/api/read", asked).json
    assert read["ids"] == [*ids[:at], 4649]
    again = {"prompt": read["prompt"], "more": read["more"]}
    assert ask(site, "/api/read", again).json["ids"] == read["ids"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/read", {"prompt": ""}, "the prompt is empty"),
        ("/api/read", {"prompt": 5}, "prompt"),
        ("/api/read", {"prompt": "x", "mroe": []}, "mroe"),
        ("/api/logits", {"ids": [10**7]}, "ids from 0 to"),
        ("/api/logits", {"ids": []}, "ids"),
        ("/api/generate", {"ids": [1], "params": {"top_q": 1}}, "did you mean"),
        ("/api/generate", {"ids": [1], "params": {"top_p": 2}}, "top_p is 2"),
        ("/api/generate", {"ids": [1], "max_tokens": 0}, "max_tokens is 0"),
        ("/api/steer", {"ids": [1], "vector": {}, "alpha": 1}, "choose one to raise"),
        ("/api/steer", {"ids": [1], "vector": {"file": "x"}, "alpha": 1}, "choose its file again"),
        ("/api/vector?name=v.bin", b"x", "expected .safetensors or .gguf"),
        ("/api/vector?name=v.safetensors", b"x" * 50, "safetensors"),
        ("/api/coverage", {"text": "x" * (5 << 20)}, "text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_in_one_line(site: Any, path: str, body: Any, says: str) -> None:
    headers = {"Content-Type": "application/octet-stream"} if isinstance(body, bytes) else None
    answer = ask(site, path, body, headers)
    assert answer.status in (400, 422)
    assert says in answer.json["error"]
    assert "\n" not in answer.json["error"]


def test_a_vector_does_what_its_certificate_allows(site: Any, model: Any, tmp_path: Any) -> None:
    v = torch.randn(576, generator=torch.Generator().manual_seed(3))
    path = SteeringVector(v / v.norm(), "head", 1.0).save(tmp_path / "v.safetensors")
    octets = {"Content-Type": "application/octet-stream"}
    reported = ask(site, "/api/vector?name=v.safetensors", path.read_bytes(), octets).json
    assert reported["layers"] == ["head"]
    assert any(one["id"] == reported["id"] for one in ask(site, "/api/vectors").json)
    ids = model.encode(FRANCE)
    plain = np.frombuffer(ask(site, "/api/logits", {"ids": ids}).body, np.float32)
    for cap in (None, 0.01):
        asked = {
            "ids": ids,
            "vector": {"file": reported["id"]},
            "alpha": reported["reach"],
            "kl_cap": cap,
        }
        found = ask(site, "/api/steer", asked).json
        z = np.frombuffer(base64.b64decode(found["logits"]), np.float32)
        delta = z.astype(float) - plain
        assert delta.max() - delta.min() <= found["certificate"]["range"] * (1 + 1e-4)
        assert found["kl"] <= found["certificate"]["kl_bound"]
        assert cap is None or found["kl"] <= cap
    assert found["strength"] < 1


def test_two_words_make_a_vector(site: Any, model: Any) -> None:
    ids = model.encode(FRANCE)
    [paris], [london] = model.encode(" Paris"), model.encode(" London")
    asked = {"ids": ids, "vector": {"raise": london, "lower": paris}, "alpha": 3, "kl_cap": None}
    found = ask(site, "/api/steer", asked).json
    plain = np.frombuffer(ask(site, "/api/logits", {"ids": ids}).body, np.float32)
    delta = np.frombuffer(base64.b64decode(found["logits"]), np.float32) - plain
    assert delta[london] > 0 > delta[paris]


def test_the_preview_of_a_trim_is_what_a_trim_keeps(site: Any, model: Any) -> None:
    from lmhead.serve.page.sizes import _order
    from lmhead.steer.prompts import NEUTRAL
    from lmhead.trim.folder import ModelFolder
    from lmhead.trim.keepset import choose, tail
    from lmhead.trim.observing import observe_texts

    found = ask(site, "/api/coverage", {"text": None}).result
    assert found["rows"][-1] == model.reachable
    assert found["share"][-1] == pytest.approx(1)
    assert found["share"] == sorted(found["share"])
    seen, _ = observe_texts(model, [model.tokenizer(text)["input_ids"] for text in NEUTRAL])
    order, always, note = _order(model, seen)
    assert note is None
    assert sorted(order) == list(range(model.reachable))
    folder = ModelFolder.open(model.folder)
    last, _ = tail(folder.tokenizer, folder.rows)
    for rows in (found["rows"][20], found["rows"][200]):
        kept = choose(
            folder.tokenizer, folder.required_ids() | last, {}, size=rows,
            usefulness=seen.mass.numpy(),
        )  # fmt: skip
        at = found["rows"].index(rows)
        assert seen.share(kept.ids) == pytest.approx(found["share"][at], abs=1e-5)
    assert always <= found["rows"][0]


def test_sizes_add_up(site: Any, model: Any) -> None:
    reported = ask(site, "/api/size").json
    whole = sum(p.numel() for p in model.body.model.parameters())
    assert sum(part["parameters"] for part in reported["parts"]) == whole
    [head] = [part for part in reported["parts"] if part["name"] == "head and embedding"]
    assert head["parameters"] == 49152 * 576
    assert reported["row"]["parameters"] == 576
    kinds = {(part["name"], part["block"]) for part in reported["parts"]}
    assert {("attention", 29), ("mlp", 0), ("norm", 7)} <= kinds


def test_generation_streams_and_ends_when_nobody_listens(site: Any, model: Any) -> None:
    body = {"ids": model.encode(FRANCE), "params": {"temperature": 0}, "max_tokens": 5}
    answer = ask(site, "/api/generate", body)
    reported = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["token"]["text"] for line in reported[:-1]][:2] == [" Paris", "."]
    assert reported[-1]["result"]["finish_reason"] == "length"

    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=300)
    long = json.dumps({**body, "params": {"temperature": 1, "seed": 1}, "max_tokens": 4000})
    headers = {"Host": f"localhost:{site.port}", "Content-Type": "application/json"}
    connection.request("POST", "/api/generate", long, headers)
    response = connection.getresponse()
    response.readline()
    response.close()
    connection.close()
    end = time.monotonic() + 60
    while threading_busy(site) and time.monotonic() < end:
        time.sleep(0.1)
    assert not threading_busy(site)


def threading_busy(site: Any) -> bool:
    """Tell whether the engine of the site still runs a request."""
    from lmhead.serve.worker import Worker

    return any(
        isinstance(owner := getattr(t, "_target", None) and t._target.__self__, Worker)
        and owner.running
        for t in threading.enumerate()
        if t.name == "lmhead-worker" and hasattr(getattr(t, "_target", None), "__self__")
    )


def test_one_thread_computes(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that multiply keep each other's OpenMP threads asleep; a lens took twice as long."""
    seen = set()
    real = torch.nn.functional.linear

    def linear(*args: Any) -> torch.Tensor:
        seen.add(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr("torch.nn.functional.linear", linear)
    ids = ask(site, "/api/read", {"prompt": "An unseen prompt of"}).json["ids"]
    token = {"raise": 260, "lower": None}
    for path, body in (
        ("/api/logits", {"ids": ids}),
        ("/api/lens", {"ids": ids, "token": None}),
        ("/api/why", {"ids": ids, "token": ids[0], "against": None, "heads": False}),
        ("/api/steer", {"ids": ids, "vector": token, "alpha": 1.0, "kl_cap": 0.5}),
        ("/api/coverage", {"text": "A few words."}),
    ):
        assert ask(site, path, body).status == 200, path
    assert seen == {"lmhead-worker"}
