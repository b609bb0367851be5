"""The page's server: its questions, and who answers them. Who may ask: `door.py`."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool

from lmhead.errors import BadInput, LMHeadError
from lmhead.generation.engine import Engine
from lmhead.loading import Model
from lmhead.serve.page.asked import Asked, Coverage, Export, Generate, Lens, Read, Steer, Why
from lmhead.serve.page.door import Door, error_reply
from lmhead.serve.page.explorer import Explorer
from lmhead.serve.page.export import STATIC, exported
from lmhead.serve.page.generating import generated, request_of
from lmhead.serve.page.jobs import log, ndjson, streamed, unexpected
from lmhead.serve.page.opening import page
from lmhead.serve.page.sizes import coverage, size
from lmhead.serve.page.steering import LARGEST, Vectors
from lmhead.serve.worker import Worker

T = TypeVar("T")


def make_app(model: Model, vectors: Sequence[Path] = (), server: str | None = None) -> FastAPI:
    """Return the application that answers for one model; `server` is the id of this run."""
    explorer, known = Explorer(model), Vectors(model, vectors)
    worker: list[Worker] = []

    async def in_turn(work: Callable[[], T]) -> T:
        """Do what needs the model in the one thread that generates (`serve/threads.py`)."""
        return await worker[0].call(work)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        worker.append(Worker(Engine(model)))
        yield
        await worker.pop().close(within=1)

    app = FastAPI(
        title="lmhead explore", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(Door, server=server or secrets.token_hex(8))
    _explain(app)

    @app.get("/", response_class=HTMLResponse)
    def page_() -> HTMLResponse:
        return page()

    @app.get("/api/alive")
    async def alive() -> dict[str, bool | None]:
        return {"alive": True, "loading": None}

    @app.get("/api/model")
    def about() -> dict[str, Any]:
        return explorer.about

    @app.get("/api/tokens")
    def tokens(request: Request) -> Response:
        tag = f'"{explorer.tokens_tag}"'
        if request.headers.get("if-none-match", "").removeprefix("W/") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return JSONResponse(explorer.tokens, headers={"ETag": tag, "Cache-Control": "no-cache"})

    @app.post("/api/read")
    async def read(asked: Read) -> dict[str, Any]:
        return await in_turn(lambda: explorer.read(asked.prompt, asked.more, asked.chat, asked.cut))

    @app.post("/api/logits")
    async def logits(asked: Asked) -> Response:
        z = await in_turn(lambda: explorer.logits(explorer.model.encode(asked.ids)))
        return Response(z.numpy().tobytes(), media_type="application/octet-stream")

    @app.post("/api/generate")
    async def generate(asked: Generate, request: Request) -> Response:
        steering = await in_turn(lambda: _steering(known, asked.steer))
        wanted = await run_in_threadpool(request_of, model, asked, steering)
        return ndjson(generated(worker[0].submit(wanted), request, model))

    @app.post("/api/lens")
    async def lens(asked: Lens, request: Request) -> Response:
        return streamed(
            request, lambda progress: explorer.lens(asked.ids, asked.token, progress), in_turn
        )

    @app.post("/api/why")
    async def why(asked: Why, request: Request) -> Response:
        def work(progress: Any) -> dict[str, Any]:
            return explorer.why(asked.ids, asked.token, asked.against, asked.heads, progress)

        return streamed(request, work, in_turn)

    @app.get("/api/vectors")
    async def vectors_() -> list[dict[str, Any]]:
        return await in_turn(known.listed)

    @app.post("/api/vector")
    async def vector(request: Request, name: str) -> dict[str, Any]:
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > LARGEST:
                raise BadInput(f"the file is larger than {LARGEST >> 20} MB; expected a vector")
        return await in_turn(lambda: known.add(name, content))

    @app.post("/api/steer")
    async def steer(asked: Steer) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            ids = model.encode(asked.ids)
            h = explorer.state(ids)[-1]
            return known.steered(h, ids, asked.vector, asked.alpha, asked.kl_cap)

        return await in_turn(work)

    @app.get("/api/size")
    def size_() -> dict[str, Any]:
        return size(model)

    @app.post("/api/coverage")
    async def coverage_(asked: Coverage, request: Request) -> Response:
        return streamed(request, lambda progress: coverage(model, asked.text, progress), in_turn)

    @app.post("/api/export")
    def export(asked: Export) -> HTMLResponse:
        return HTMLResponse(exported(asked.state, asked.replies))

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def _steering(known: Vectors, asked: Any) -> Any:
    if asked is None:
        return None
    return known.steering(asked.vector, asked.alpha, asked.kl_cap)


def _explain(app: FastAPI) -> None:
    """Say what went wrong as one line."""

    @app.exception_handler(LMHeadError)
    async def wrong(request: Request, error: LMHeadError) -> Response:
        return error_reply(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return error_reply(422, f"{where or 'the request'}: {first['msg']}")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return error_reply(500, unexpected())
