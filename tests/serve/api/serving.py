"""A server of a tiny random model with the real tokenizer of smollm2-135m, over real HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("fastapi", reason="needs the extra `serve`")

from lmhead.loading import Model  # noqa: E402
from lmhead.serve.api.app import create_app  # noqa: E402
from lmhead.serve.api.run import Runner, listen  # noqa: E402
from lmhead.serve.api.server import Server  # noqa: E402
from lmhead.serve.api.settings import Settings  # noqa: E402


@dataclass
class Live:
    """A server that runs, and how to ask it."""

    url: str
    server: Server
    runner: Any
    thread: threading.Thread

    @property
    def model(self) -> Model:
        return self.server.model

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def idle(self) -> bool:
        """Wait until nothing runs any more."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if not self.server.worker.engine.busy and not self.server.worker._open:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def serving(model: Model, settings: Settings | None = None, **options: Any) -> Iterator[Live]:
    app = create_app(model, name="tiny", settings=settings or Settings(drain=5), **options)
    socket = listen("127.0.0.1", 0)
    runner = Runner(app, app.state.server.settings)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not runner.started and time.monotonic() < end:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        yield Live(url, app.state.server, runner, thread)
    finally:
        runner.should_exit = True
        thread.join(30)
        socket.close()
