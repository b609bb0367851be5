"""What small OpenAI-style servers get wrong, each as a test that this one must pass."""

import http.client
import json
import math
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from serving import Live

from lmhead.generation import Engine, Request, next_tokens
from lmhead.generation.score import scores
from lmhead.sampling import Sampler, SamplingParams

pytestmark = pytest.mark.model

PROMPT = "Once upon a time there was"


def complete(live: Live, **body: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body}
    reply = live.post("/v1/completions", asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", live.url + path, json={**body, "stream": True}, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_echo_with_logprobs_scores_the_prompt(live: Live) -> None:
    """llama.cpp 27174: without it lm-eval is at chance, silently."""
    ids = live.model.encode(PROMPT)
    reported = complete(live, prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=1)
    for choice, given in zip(reported["choices"], (ids, ids[:3]), strict=True):
        rows = choice["logprobs"]
        assert len(rows["token_logprobs"]) == len(given) + 1
        assert rows["token_logprobs"][0] is rows["top_logprobs"][0] is None
        expected = next(iter(scores([(None, given)], live.model))).logprobs[1:]
        assert rows["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        with torch.inference_mode():
            h, _ = live.model.body(torch.tensor([given]), use_cache=False)
            best = live.model.head(h[0]).argmax(-1).tolist()
        for place in range(1, len(given)):
            greedy = rows["token_logprobs"][place] == max(rows["top_logprobs"][place].values())
            assert greedy == (best[place - 1] == given[place])
        assert rows["token_logprobs"][-1] == max(rows["top_logprobs"][-1].values())
        text = live.model.decode(given)
        assert choice["text"].startswith(text)
        assert rows["text_offset"][-1] == len(text)
    only = complete(live, echo=True, logprobs=0, max_tokens=0)
    assert only["choices"][0]["text"] == PROMPT
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == len(ids)


def test_bytes_of_half_a_character_are_exact(live: Live) -> None:
    """ollama 13497, mlx-vlm 1147: an emoji is several tokens, and its bytes add up."""
    ids = live.model.encode("a 🦙 b")
    reported = complete(live, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    tokens = reported["choices"][0]["logprobs"]["tokens"]
    assert any(token.startswith("bytes:\\x") for token in tokens)
    assert b"".join(live.server.pieces.bytes_of(i) for i in ids).decode() == "a 🦙 b"
    llama = live.model.encode("🦙")
    assert len(llama) > 1
    bias = [{"logit_bias": {str(i): 1000}} for i in llama]
    first = complete(live, **bias[0], max_tokens=1)
    assert first["choices"][0]["text"] == "\ufffd"


def test_no_stream_splits_a_character(live: Live) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    reported = chunks(
        live, "/v1/completions", {"prompt": "x", "regex": "a🦙{3}b", "max_tokens": 40}
    )
    texts = [chunk["choices"][0]["text"] for chunk in reported]
    assert "".join(texts) == "a🦙🦙🦙b"
    assert not any("\ufffd" in text for text in texts)


def test_top_logprobs_of_one_text_do_not_collapse(live: Live) -> None:
    """sglang 32290: two ids may have the same text."""
    pieces = live.server.pieces
    same = {5: -1.0, 6: -2.0, 7: -3.0}
    from lmhead.serve.api.completions import _Shape

    shape = _Shape(pieces, False, True, 3, False)
    pieces_of = pieces.text_of
    try:
        pieces.text_of = lambda id: "same"  # type: ignore[method-assign]
        assert shape._named(same) == {"same": -1.0, "token_id:6": -2.0, "token_id:7": -3.0}
    finally:
        pieces.text_of = pieces_of  # type: ignore[method-assign]
    reported = complete(live, logprobs=40, return_tokens_as_token_ids=True)
    for top in reported["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) == 40
        assert all(name.startswith("token_id:") for name in top)


def test_raw_and_processed_logprobs(live: Live) -> None:
    """vllm 9453: both are there, and raw is what is told unasked."""
    asked = {"logprobs": 1, "temperature": 0.25, "seed": 4, "max_tokens": 3}
    unasked = complete(live, **asked)["choices"][0]
    raw = complete(live, **asked, logprobs_mode="raw")["choices"][0]
    processed = complete(live, **asked, logprobs_mode="processed")["choices"][0]
    assert unasked == raw
    assert raw["text"] == processed["text"]
    first = raw["logprobs"]["top_logprobs"][0]
    hotter = processed["logprobs"]["top_logprobs"][0]
    found = next_tokens(PROMPT, live.model, top=1, temperature=0.25).tokens[0]
    assert max(first.values()) == pytest.approx(math.log(found.probability), abs=1e-4)
    assert max(hotter.values()) == pytest.approx(math.log(found.after), abs=1e-4)


def test_no_stop_text_leaks(live: Live) -> None:
    """vllm 3574: a stop text across several tokens, streamed too."""
    whole = complete(live, max_tokens=24)["choices"][0]["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    expected = whole[: whole.index(stop)]
    reported = complete(live, max_tokens=24, stop=[stop])["choices"][0]
    assert (reported["text"], reported["finish_reason"]) == (expected, "stop")
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": stop}
    parts = chunks(live, "/v1/completions", body)
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_the_seed_is_the_requests_own(live: Live) -> None:
    """`transformers serve` sets it for everybody."""
    state = torch.random.get_rng_state()
    asked = {"temperature": 1.0, "seed": 11, "n": 2}
    first = complete(live, **asked)
    complete(live, temperature=1.0, seed=12)
    again = complete(live, **asked)
    assert first["choices"] == again["choices"]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]
    free = {complete(live, temperature=1.0)["choices"][0]["text"] for _ in range(3)}
    assert len(free) == 3
    assert torch.equal(state, torch.random.get_rng_state())
    sampler = Sampler.from_params(
        SamplingParams(seed=11, stop_ids=live.model.stop_ids), vocab_size=live.model.reachable
    )
    engine = Engine(live.model)
    engine.submit(Request(live.model.encode(PROMPT), sampler, 8))
    alone = next(event.result for event in engine.run() if event.result)
    assert alone.text == first["choices"][0]["text"]


def test_unknown_fields_pass(live: Live) -> None:
    assert complete(live, some_new_field={"a": 1}, user="me", best_of=1, suffix=None)


def test_all_controls_reach_the_sampler(live: Live) -> None:
    plain = complete(live, max_tokens=6)["choices"][0]
    ids = live.model.encode(PROMPT)
    banned = complete(live, max_tokens=6, banned_ids=[live.model.encode(plain["text"])[0]])
    assert banned["choices"][0]["text"] != plain["text"]
    allowed = complete(live, max_tokens=3, allowed_ids=[ids[0]])
    assert allowed["choices"][0]["text"] == live.model.decode([ids[0]] * 3)
    bias = complete(live, max_tokens=2, logit_bias={str(ids[1]): 1000})
    assert bias["choices"][0]["text"] == live.model.decode([ids[1]] * 2)
    dry = complete(live, dry_multiplier=2.0, repetition_penalty=1.5, order="llama.cpp", top_k=3)
    assert dry["choices"]


def test_a_prompt_that_is_too_long_tells_both_lengths(live: Live) -> None:
    reply = live.post("/v1/completions", {"prompt": [5] * 1025})
    assert reply.status_code == 400
    assert "1,025 tokens" in reply.json()["error"]["message"]
    assert "at most 1,024" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    full = complete(live, prompt=[5] * 1024, max_tokens=5, ignore=1)
    assert full["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_work(live: Live, stream: bool) -> None:
    """llama.cpp 24496."""
    assert live.idle()
    before = live.server.worker.counts.cancelled
    body = {"prompt": PROMPT, "max_tokens": 1000, "stream": stream, "min_tokens": 1000}
    address = urlsplit(live.url)
    client = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    client.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    if stream:
        assert client.getresponse().readline().startswith(b"data:")
    while not live.server.worker.engine.busy:
        time.sleep(0.001)
    client.close()
    assert live.idle()
    assert live.server.worker.counts.cancelled == before + 1


def test_a_full_queue_says_when_to_come_again(live: Live) -> None:
    from serving import serving

    with serving(live.model, batch_size=1, queue=0) as small:
        engine, step = small.server.worker.engine, small.server.worker.engine.step
        engine.step = lambda: (time.sleep(0.02), step())[1]  # type: ignore[method-assign]
        body = {"prompt": PROMPT, "max_tokens": 1000, "min_tokens": 1000, "stream": True}
        with httpx.stream("POST", small.url + "/v1/completions", json=body) as held:
            lines = held.iter_lines()  # kept: a reader that is dropped closes the connection
            next(lines)
            refused = small.post("/v1/completions", {"prompt": PROMPT})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert small.idle()
        assert small.post("/v1/completions", {"prompt": PROMPT}).status_code == 200
        many = small.post("/v1/completions", {"prompt": PROMPT, "n": 2})
        assert many.status_code == 400, "it would never fit"


def test_shutdown_finishes_what_runs(live: Live) -> None:
    from serving import serving

    with serving(live.model) as other:
        body = {"prompt": PROMPT, "max_tokens": 60, "min_tokens": 60, "temperature": 0}
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(other.post("/v1/completions", body))
        )
        thread.start()
        while not other.server.worker.engine.busy:
            time.sleep(0.005)
        other.runner.should_exit = True
        thread.join(30)
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        other.thread.join(20)
        assert not other.thread.is_alive()
        assert not other.server.worker.alive


def test_chat_and_legacy_logprobs_have_their_own_shapes(live: Live) -> None:
    """llama-cpp-python 1787."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True}
    reported = live.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]
    assert set(reported) == {"content", "refusal"}
    assert set(reported["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    legacy = complete(live, logprobs=1)["choices"][0]["logprobs"]
    assert set(legacy) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


def test_tokenizer_without_a_tokenizer(live: Live) -> None:
    info = live.get("/tokenizer_info").json()
    reported = live.post(
        "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}
    ).json()
    assert reported["tokens"] == [live.model.tokenizer.eos_token_id]
    ids = live.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert ids == live.model.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    assert live.post("/detokenize", {"tokens": ids}).json() == {"prompt": PROMPT}
    assert live.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_choices_read_only_their_rows(live: Live) -> None:
    """vllm 56767: scoring a few ids needs no whole product."""
    body = {"prompt": "The capital of France is", "choices": [" Paris", " London", " Rome"]}
    reported = live.post("/v1/choices", body).json()
    assert reported["rows_read"] == 3
    ids = [choice["ids"][0] for choice in reported["choices"]]
    with torch.inference_mode():
        z = live.model.head(live.model.last_hidden(body["prompt"]))[ids]
    assert [c["score"] for c in reported["choices"]] == pytest.approx(z.tolist(), abs=1e-4)
    shares = torch.softmax(z, 0).tolist()
    assert [c["probability"] for c in reported["choices"]] == pytest.approx(shares, abs=1e-5)
    assert reported["best"] == int(z.argmax())
    longer = live.post("/v1/choices", {**body, "choices": [" Paris of course", " no"]}).json()
    assert longer["rows_read"] is None
    pairs = [(body["prompt"], " Paris of course"), (body["prompt"], " no")]
    expected = [one.logprob for one in scores(pairs, live.model)]
    assert [c["score"] for c in longer["choices"]] == pytest.approx(expected, abs=1e-3)


def test_lens_ends_with_what_the_model_says(live: Live) -> None:
    reported = live.post("/v1/lens", {"prompt": PROMPT, "top": 2, "last": 3, "token": " a"}).json()
    assert len(reported["rows"]) == 3, "the embedding and two blocks"
    assert all(len(row["cells"]) == 3 for row in reported["rows"])
    best = next_tokens(PROMPT, live.model, top=1).tokens[0]
    assert reported["rows"][-1]["cells"][-1]["top"][0]["id"] == best.id
    wrong = live.post("/v1/lens", {"prompt": PROMPT, "token": "no such token at all"})
    assert wrong.status_code == 400


def test_next_tells_the_trace(live: Live) -> None:
    reported = live.post("/v1/next", {"prompt": PROMPT, "top": 5, "top_k": 2}).json()
    assert len(reported["tokens"]) == 5
    assert [step["name"] for step in reported["trace"]["steps"]][-1] == "top_k"
    plain = live.post("/v1/next", {"prompt": PROMPT}).json()
    expected = next_tokens(PROMPT, live.model)
    assert [t["id"] for t in plain["tokens"]] == [t.id for t in expected.tokens]
    assert plain["trace"] is None
