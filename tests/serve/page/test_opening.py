"""The page before its model is there: it opens at once; the rest waits, or is told why not."""

import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from fastapi import FastAPI  # noqa: E402

from lmhead.errors import BadInput  # noqa: E402
from lmhead.progress import Progress, silent  # noqa: E402
from lmhead.serve.page.door import Door  # noqa: E402
from lmhead.serve.page.opening import Opening  # noqa: E402
from lmhead.serve.page.run import listening, serve  # noqa: E402


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    content: bytes


class Loading:
    """A server whose application is made when the test says so."""

    def __init__(self) -> None:
        self.go, self.ready, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.alive = False
        taken = listening(0)
        self.port = taken.getsockname()[1]
        opening = Opening(self.make, silent, self.ready.set, self.ended.set)
        self.server = uvicorn.Server(uvicorn.Config(opening, log_level="warning", lifespan="on"))
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [taken]}, daemon=True
        )
        self.thread.start()

    def make(self, server: str, progress: Progress) -> FastAPI:
        with progress("loading a model", total=10) as advance:
            advance(4)
            assert self.go.wait(60)

        @asynccontextmanager
        async def life(app: FastAPI) -> AsyncIterator[None]:
            self.alive = True
            yield
            self.alive = False

        app = FastAPI(lifespan=life)
        app.add_middleware(Door, server=server)

        @app.post("/api/model")
        def model(body: dict[str, int]) -> dict[str, int]:
            return body

        return app

    def ask(self, path: str, body: Any = None, host: str = "localhost") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Host": f"{host}:{self.port}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers, response.read())
        connection.close()
        return answer


@pytest.fixture
def loading() -> Iterator[Loading]:
    server = Loading()
    yield server
    server.go.set()
    server.server.should_exit = True
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_the_page_opens_before_the_model_is_there(loading: Loading) -> None:
    page = loading.ask("/")
    assert page.status == 200
    assert b"lmhead" in page.content
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert loading.ask("/static/main.js").status == 200
    assert loading.ask("/static/nothing.js").status == 404
    step = {"title": "loading a model", "done": 4, "total": 10}
    deadline = time.monotonic() + 30
    while (reported := json.loads(loading.ask("/api/alive").content))["loading"] != step:
        assert time.monotonic() < deadline, reported
    # whoever does not belong here is turned away at once, not kept waiting
    assert loading.ask("/api/model", {"a": 1}, host="evil.example").status == 403
    assert not loading.ready.is_set()


def test_what_was_asked_too_early_is_answered_in_the_end(loading: Loading) -> None:
    server = loading.ask("/").headers["X-Lmhead-Server"]
    found: list[Answer] = []
    early = threading.Thread(target=lambda: found.append(loading.ask("/api/model", {"a": 1})))
    early.start()
    early.join(0.5)
    assert early.is_alive()
    loading.go.set()
    early.join(30)
    assert json.loads(found[0].content) == {"a": 1}
    assert found[0].headers.get_all("X-Lmhead-Server") == [server]
    assert loading.ready.wait(30)
    assert loading.alive  # the application's own start has run
    loading.server.should_exit = True
    loading.thread.join(30)
    assert not loading.alive  # and its end


def test_the_end_does_not_wait_for_the_model(loading: Loading) -> None:
    loading.ask("/")
    began = time.monotonic()
    loading.server.should_exit = True
    loading.thread.join(30)
    assert not loading.thread.is_alive()
    assert time.monotonic() - began < 20
    assert not loading.ready.is_set()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def make(server: str, progress: Progress) -> FastAPI:
        raise BadInput("there is no such model")

    with pytest.raises(BadInput, match="no such model"):
        serve(make, listening(0))
