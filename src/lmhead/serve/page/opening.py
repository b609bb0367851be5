"""The page before its model is there: it opens at once, and tells how far loading is.

Imports and a model take seconds. Until they are over, the page's own files are answered, and
`/api/alive` tells what is being done; every other question waits, and is answered by the real
application. Nothing here imports torch.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from lmhead.progress import Advance, Progress
from lmhead.serve.page.door import Door, error_reply, refused
from lmhead.serve.page.export import STATIC

if TYPE_CHECKING:
    from fastapi import FastAPI

_AT_ONCE = ("/", "/api/alive", "/static/")


class Opening:
    """Makes the application in a thread, and is it from then on.

    `make(server, progress)` loads what the application needs; `server` is the id of this run.
    `ready` is called when its answers begin, `end` when it failed: then `error` says why.
    """

    def __init__(
        self,
        make: "Callable[[str, Progress], FastAPI]",
        progress: Progress,
        ready: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None
        self._make, self._shown, self._ready, self._end = make, progress, ready, end
        self._server = secrets.token_hex(8)
        self._app: FastAPI | None = None
        self._settled = asyncio.Event()  # there is an application, or an error
        self._step: dict[str, Any] = {"title": "starting", "done": 0, "total": None}
        early = Starlette(
            routes=[
                Route("/", self._page),
                Route("/api/alive", self._alive),
                Mount("/static", StaticFiles(directory=STATIC)),
                Route("/{path:path}", self._failed, methods=["GET", "POST"]),
            ]
        )
        self._early = Door(early, self._server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or live."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None and scope["type"] == "http":
            path = scope["path"]
            early = path in _AT_ONCE or path.startswith(_AT_ONCE[-1])
            if not early and not refused(Request(scope)):
                await self._settled.wait()
        await (self._app or self._early)(scope, receive, send)

    async def _page(self, request: Request) -> Response:
        return page()

    async def _alive(self, request: Request) -> Response:
        return JSONResponse({"alive": True, "loading": self._step})

    async def _failed(self, request: Request) -> Response:
        return error_reply(503, str(self.error))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # startup
        over = asyncio.Event()
        living = asyncio.create_task(self._open(over))
        await send({"type": "lifespan.startup.complete"})
        await receive()  # shutdown
        over.set()
        if not self._settled.is_set():  # nobody waits for the model any more
            living.cancel()
        await asyncio.wait([living])
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self, over: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[FastAPI] = loop.create_future()

        def settle(app: "FastAPI | None", error: BaseException | None) -> None:
            if made.cancelled():
                return
            if app is not None:
                made.set_result(app)
            else:
                made.set_exception(error or RuntimeError("no application was made"))

        def work() -> None:
            app, error = None, None
            try:
                app = self._make(self._server, self._progress)
            except BaseException as caught:  # it is raised where the server was started
                error = caught
            try:
                loop.call_soon_threadsafe(settle, app, error)
            except RuntimeError:  # the server is gone
                return

        # Not asyncio.to_thread: Ctrl-C would wait for the model.
        threading.Thread(target=work, name="lmhead-page-loading", daemon=True).start()
        try:
            app = await made
            async with app.router.lifespan_context(app):
                self._app = app
                self._settled.set()
                self._ready()
                await over.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = error
            self._settled.set()
            self._end()

    @contextmanager
    def _progress(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Tell a step to the page, and to whoever looks at the terminal."""
        step = self._step = {"title": title, "done": 0, "total": total}
        with self._shown(title, total) as shown:

            def advance(n: int) -> None:
                step["done"] += n
                shown(n)

            yield advance


def page() -> HTMLResponse:
    """Return the page itself."""
    return HTMLResponse((STATIC / "index.html").read_text(encoding="utf-8"))
