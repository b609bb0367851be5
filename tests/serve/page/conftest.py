"""The page as it runs: the real server in a thread, and a real Chromium before it."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SLOW = 240_000  # milliseconds: a busy machine is no failure


class Site:
    """A server in a thread of this process; `restart` ends it and begins another on its port."""

    def __init__(self, model: Any) -> None:
        from lmhead.serve.page.run import listening

        self.model = model
        taken = listening(0)
        self.port = taken.getsockname()[1]
        self.url = f"http://localhost:{self.port}/"
        self._start(taken)

    def _start(self, taken: socket.socket) -> None:
        import uvicorn

        from lmhead.serve.page.app import make_app

        config = uvicorn.Config(
            make_app(self.model), log_level="warning", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [taken]}, daemon=True
        )
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)

    def restart(self) -> None:
        from lmhead.serve.page.run import listening

        self.stop()
        self._start(listening(self.port))


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Any:
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    from lmhead import load

    return load("smollm2-135m")


@pytest.fixture(scope="session")
def site(model: Any) -> Iterator[Site]:
    site = Site(model)
    yield site
    site.stop()


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")  # while it is open, this thread's event loop runs: no asyncio.run
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, site: Site) -> Iterator[Callable[..., Any]]:
    """Open the page at an address; in the end nothing may have gone wrong on it, or elsewhere."""
    contexts, wrong = [], []

    def open_page(address: str = "", *, width: int = 1280, theme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SLOW)
        page.expected = []  # console errors that a test brings about
        page.on("console", lambda m: wrong.append((page, m.text)) if m.type == "error" else None)
        page.on("pageerror", lambda e: wrong.append((page, str(e))))
        page.on("request", lambda r: _own(r.url, site.url, wrong, page))
        page.goto(f"{site.url}#{address}")
        page.wait_for_selector("body[data-ready]", timeout=SLOW)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for page, text in wrong if not any(e in text for e in page.expected)] == []


def _own(url: str, home: str, wrong: list[Any], page: Any) -> None:
    if not url.startswith((home, "data:", "blob:")):
        wrong.append((page, f"a request to {url}"))
