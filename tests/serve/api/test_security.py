"""Who may ask, how much, and what is never told."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Live, serving

from lmhead.cli import run
from lmhead.errors import BadInput
from lmhead.serve.api.logs import Lines
from lmhead.serve.api.settings import Settings, check_exposed, check_key, is_loopback

KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def locked(tiny_served: Any):
    settings = Settings(
        key=KEY,
        origins=("https://page.example",),
        hosts=("127.0.0.1",),
        max_body=2000,
        max_vector=5000,
        body_time=0.5,
        drain=5,
    )
    with serving(tiny_served, settings) as running:
        yield running


@pytest.mark.model
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", f"bearer {KEY}", f"Bearer {KEY}x", f"Basic {KEY}"]
)
def test_the_key_is_needed_and_compared_whole(locked: Live, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    reply = locked.get("/v1/models", headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in reply.text
    good = locked.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert good.status_code == 200
    assert locked.get("/healthz").status_code == 200


@pytest.mark.model
def test_a_preflight_comes_without_the_key(locked: Live) -> None:
    asks = {"Access-Control-Request-Method": "POST"}
    reported = httpx.options(
        locked.url + "/v1/completions", headers={**asks, "Origin": "https://page.example"}
    )
    assert reported.status_code == 204
    assert reported.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        locked.url + "/v1/completions", headers={**asks, "Origin": "https://evil.example"}
    )
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers
    reply = locked.get("/healthz", headers={"Origin": "https://page.example"})
    assert reply.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.model
def test_another_name_of_this_machine_is_refused(locked: Live) -> None:
    reply = locked.get("/healthz", headers={"Host": "evil.example"})
    assert reply.status_code == 403


@pytest.mark.model
def test_bodies_are_limited_in_size_and_time(locked: Live) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    large = locked.post("/v1/completions", {"prompt": "x" * 3000}, headers=headers)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")

    def endless():
        while True:
            yield b" " * 500

    try:
        reported = httpx.post(locked.url + "/v1/completions", content=endless(), headers=headers)
        assert reported.status_code == 413
    except httpx.TransportError:
        pass  # the connection was closed while it was still sending
    import socket
    from urllib.parse import urlparse

    at = urlparse(locked.url)
    with socket.create_connection((at.hostname, at.port)) as slow:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        )
        slow.sendall((head + "Content-Length: 100\r\n\r\n{").encode())
        slow.settimeout(10)
        assert b"408" in slow.recv(1000)


@pytest.mark.model
def test_too_many_connections_are_refused(tiny_served: Any) -> None:
    with serving(tiny_served, Settings(max_connections=1, drain=5)) as small:
        body = {"prompt": "x", "max_tokens": 900, "min_tokens": 900, "stream": True}
        with httpx.stream("POST", small.url + "/v1/completions", json=body) as held:
            lines = held.iter_lines()  # kept: a reader that is dropped closes the connection
            next(lines)
            reply = small.get("/v1/models")
            assert reply.status_code == 503
            assert "retry-after" in reply.headers


@pytest.mark.model
def test_a_failure_tells_no_traceback(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret /home/of/somebody")

    monkeypatch.setattr(live.server.worker, "submit_all", broken)
    reply = live.post("/v1/completions", {"prompt": "x"})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text


@pytest.mark.model
def test_time_is_limited(tiny_served: Any) -> None:
    with serving(tiny_served, Settings(time=0.3, drain=5)) as hasty:
        body = {"prompt": "x", "max_tokens": 1000, "min_tokens": 1000}
        reply = hasty.post("/v1/completions", body)
        assert reply.status_code == 408
        assert hasty.idle()


@pytest.mark.model
def test_logs_hold_no_prompt_unless_asked(live: Live, tiny_served: Any) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("lmhead.serve")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        live.post("/v1/completions", {"prompt": "a private matter", "max_tokens": 2})
        live.get("/v1/steering/private-name")
        lines = [Lines().format(record) for record in records]
        assert not any("private" in line for line in lines)
        reported = json.loads(lines[0])
        assert reported["path"] == "/v1/completions"
        assert (reported["prompt_tokens"], reported["completion_tokens"]) == (3, 2)
        records.clear()
        with serving(tiny_served, Settings(log_prompts=True, drain=5)) as telling:
            telling.post("/v1/completions", {"prompt": "a private matter", "max_tokens": 2})
        assert any("a private matter" in Lines().format(record) for record in records)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.model
def test_docs_need_nothing_from_outside(live: Live) -> None:
    page = live.get("/docs")
    assert page.status_code == 200
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in live.get("/openapi.json").json()["paths"]:
        assert path in page.text


@pytest.mark.model
def test_metrics_count(live: Live) -> None:
    live.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    text = live.get("/metrics").text
    for name in (
        'lmhead_requests_total{path="/v1/completions",status="200"}',
        "lmhead_generated_tokens_total",
        "lmhead_queue ",
        "lmhead_batch ",
        "lmhead_first_token_seconds_bucket",
        "lmhead_token_seconds_bucket",
    ):
        assert name in text


def test_other_machines_need_a_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.0.1"):
        check_exposed(host, None)
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "192.168.0.4", "example.org"):
        with pytest.raises(BadInput, match="no key"):
            check_exposed(host, None)
        check_exposed(host, "a long enough key")
    for key in ("short", "with a space", "ümläut-key"):
        with pytest.raises(BadInput, match="at least 8"):
            check_key(key, "KEY")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-env"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--engine", "warp"], "warp"),
        (["--vectors", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_calls_are_said_before_a_model_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "-m", "no-such-model-either", *options]) == 2
    reported = capsys.readouterr().err
    assert said in reported
    assert "no-such-model" not in reported


def test_a_port_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from lmhead.serve.api.run import listen

    held = listen("127.0.0.1", 0)
    port = str(held.getsockname()[1])
    assert run(["serve", "no-such-model", "--port", port]) == 2
    assert port in capsys.readouterr().err
    held.close()


def test_no_path_of_a_client_is_opened(tmp_path: Path) -> None:
    from lmhead.serve.api.errors import Refused
    from lmhead.serve.api.vectors import check_name

    for name in ("../x", "/etc/passwd", ".hidden", "a/b", "a\\b", "", "x" * 65, "a\n", "ä"):
        with pytest.raises(Refused):
            check_name(name)


@pytest.mark.model
def test_who_says_nothing_keeps_nobody_out(
    tiny_served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn waits forever for the first line of a request, and counts such connections."""
    import socket
    import time

    from lmhead.serve.api import run as running

    def opened(live: Live, count: int) -> list[socket.socket]:
        at = live.url.removeprefix("http://").split(":")
        made = [socket.create_connection((at[0], int(at[1])), timeout=10) for _ in range(count)]
        for one in made[::2]:
            one.sendall(b"POST /v1/compl")
        return made

    with serving(tiny_served, Settings(max_connections=4, drain=5)) as small:  # 8 connections
        held = opened(small, 12)
        for _ in range(3):
            assert small.get("/healthz").status_code == 200
        for one in held:
            one.close()
    monkeypatch.setattr(running, "IDLE", 0.3)
    with serving(tiny_served, Settings(max_connections=4, drain=5)) as hasty:
        held = opened(hasty, 4)
        began = time.monotonic()
        for one in held:
            assert one.recv(10) == b""  # closed by the server
            one.close()
        assert time.monotonic() - began < 10
        slow = {"prompt": "x", "max_tokens": 300, "min_tokens": 300}
        assert hasty.post("/v1/completions", slow).status_code == 200, "a busy one is not idle"


@pytest.mark.model
def test_at_shutdown_what_cannot_finish_is_told_so(tiny_served: Any) -> None:
    import concurrent.futures
    import time

    with serving(tiny_served, Settings(drain=0.2)) as ending:
        asked = {"prompt": "x", "max_tokens": 900, "min_tokens": 900}

        def stream() -> list[str]:
            body = {**asked, "stream": True}
            url = ending.url + "/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                return [line for line in reply.iter_lines() if line.startswith("data:")]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(stream)
            whole = pool.submit(ending.post, "/v1/completions", asked)
            end = time.monotonic() + 30
            while ending.server.worker.running < 2 and time.monotonic() < end:
                time.sleep(0.01)
            ending.runner.should_exit = True
            reply, lines = whole.result(), streamed.result()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert json.loads(lines[-2][5:])["error"]["code"] == "shutting_down"
    assert lines[-1] == "data: [DONE]"


@pytest.mark.model
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": 7}, "prompt", "prompt is wrong; expected a text, a list of ids"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "is a text; expected a number"),
        ({"prompt": "x", "temperature": -1}, "temperature", "is -1; expected at least 0"),
        ({"prompt": "x", "seed": 1e99}, "seed", "a very large number; expected a whole number"),
        ({"prompt": "x", "mirostat": 7}, "mirostat", "mirostat is 7; expected 0 or 2"),
        ({"prompt": "x", "logprobs_mode": "best"}, "logprobs_mode", "none that is known"),
        ({"prompt": "x", "stream_options": 1}, "stream_options", "is 1; expected an object"),
        ({"prompt": "x", "steering": [{}]}, "steering", "steering.0.name is missing"),
        ({"prompt": "x", "steering": [{"name": "nobody"}]}, "steering", "'nobody'"),
        ({"prompt": [10**6]}, "prompt", "the id 1,000,000"),
        ({"prompt": "x", "model": "gpt"}, "model", "there is no model 'gpt' here"),
        ({"prompt": "x", "regex": "("}, "regex", "the regex cannot be used"),
        ({"prompt": "x", "dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers", "65 texts"),
        ({}, "prompt", "prompt is missing"),
        ([], None, "the body is a list; expected one JSON object"),
    ],
)
def test_an_error_says_what_it_got_and_what_it_expected(
    live: Live, body: Any, param: str | None, said: str
) -> None:
    if "regex" in body:
        pytest.importorskip("llguidance", reason="needs the extra `guided`")
    reply = live.post("/v1/completions", body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.model
def test_a_body_without_its_type_is_told_to_name_it(live: Live) -> None:
    url = live.url + "/v1/completions"
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    reported = httpx.post(url, content=b'{"prompt": "x"}', headers=form).json()["error"]["message"]
    assert "Content-Type" in reported
    assert "empty" in httpx.post(url).json()["error"]["message"]
    assert live.get("/", follow_redirects=True).text.startswith("<!doctype html>")


@pytest.mark.model
def test_many_long_choices_hold_nobody_up(live: Live) -> None:
    """They are scored a few at a time, between the steps of those who generate."""
    import threading
    import time

    body = {"prompt": "word " * 600, "choices": [f" a b c {i}" for i in range(200)]}
    done: list[float] = []

    def ask() -> None:
        assert live.post("/v1/choices", body).status_code == 200
        done.append(time.monotonic())

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.2)
    for _ in range(3):
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    short = time.monotonic()
    asking.join()
    assert short < done[0]
