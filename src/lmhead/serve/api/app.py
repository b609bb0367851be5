"""The server as an ASGI app: `create_app(model)`, and everything behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import HTMLResponse, RedirectResponse, Response

from lmhead import __version__
from lmhead.generation import Engine
from lmhead.generation import Request as GenerationRequest
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.sampling import Sampler, SamplingParams
from lmhead.serve.api import chat, completions, extras, page, steering, tokens
from lmhead.serve.api.errors import ErrorReply, Json, install_errors
from lmhead.serve.api.invalid import invalid
from lmhead.serve.api.logs import Logged
from lmhead.serve.api.security import Gate
from lmhead.serve.api.server import Server
from lmhead.serve.api.settings import Settings
from lmhead.serve.api.vectors import Vectors
from lmhead.serve.worker import Worker

PREFILL = 256  # tokens of a long prompt that are read in one step, beside those who generate
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "Something in the request is wrong."},
    401: {"model": ErrorReply, "description": "The key is missing or wrong."},
    403: {"model": ErrorReply, "description": "Not from there."},
    404: {"model": ErrorReply, "description": "There is no such model, vector or address."},
    405: {"model": ErrorReply, "description": "Not this method."},
    408: {"model": ErrorReply, "description": "It took too long."},
    409: {"model": ErrorReply, "description": "The name is taken, or there is no room."},
    413: {"model": ErrorReply, "description": "The body is too large."},
    429: {"model": ErrorReply, "description": "The queue is full; Retry-After says when."},
    499: {"model": ErrorReply, "description": "The client went away."},
    503: {"model": ErrorReply, "description": "Shutting down, or too many connections."},
}


def create_app(
    model: Model,
    *,
    name: str | None = None,
    head: Head | None = None,
    settings: Settings | None = None,
    batch_size: int = 8,
    queue: int = 64,
) -> Logged:
    """Return the server of a model as an ASGI app; its worker runs from start to shutdown.

    `head` is an engine to use instead of the model's own head. `app.state.server` of the inner
    FastAPI app holds what the answers share.
    """
    settings = settings or Settings()
    worker = Worker(Engine(model, head, batch_size=batch_size, prefill=PREFILL), queue=queue)
    vectors = Vectors(model, settings.vectors, settings.max_vectors)
    # a request may not ask for more at once than ever fits
    most = min(settings.max_prompts, batch_size + queue)
    server = Server(name or model.name, model, worker, replace(settings, max_prompts=most), vectors)
    app = _app(server)
    paths = frozenset(path for path in app.openapi()["paths"] if "{" not in path)
    logged = Logged(Gate(app, server.settings), server.metrics, paths)
    logged.state = app.state
    return logged


def warm_up(model: Model, head: Head | None = None) -> None:
    """Draw two tokens: what is compiled at first use is compiled before anybody waits for it."""
    engine = Engine(model, head)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=0, logprobs=1)):
        sampler = Sampler.from_params(params, "hf", vocab_size=model.reachable)
        engine.submit(GenerationRequest(model.encode([0]), sampler, max_tokens=2))
    while engine.busy:
        engine.step()


def _app(server: Server) -> FastAPI:
    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await server.worker.close(server.settings.drain)

    app = FastAPI(
        title="lmhead serve",
        description="An OpenAI-style server of one model that can steer each request by itself.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        responses=_ERRORS,
        default_response_class=Json,
        redirect_slashes=False,
    )
    app.state.server = server
    install_errors(app)
    app.add_exception_handler(RequestValidationError, invalid)
    for part in (completions, chat, tokens, extras, steering):
        app.include_router(part.router)
    _add_own(app, server)
    _drop_422(app)
    return app


def _add_own(app: FastAPI, server: Server) -> None:
    @app.get("/healthz", response_model=None)
    async def healthz() -> Json:
        """Tell that the server is there."""
        return Json({"status": "ok"})

    @app.get("/readyz", response_model=None)
    async def readyz() -> Json:
        """Tell whether it takes requests: 503 while it shuts down."""
        ready = server.worker.alive
        return Json({"status": "ready" if ready else "closing"}, status_code=200 if ready else 503)

    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Tell what the server did, for Prometheus."""
        text = await asyncio.to_thread(server.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def front() -> RedirectResponse:
        return RedirectResponse("docs")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(page.html_of(request.app.openapi()), headers=page.HEADERS)


def _drop_422(app: FastAPI) -> None:
    """Leave FastAPI's own form of errors out of the document: here it is a 400 of our form."""
    document = app.openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for method, path in (("get", "/healthz"), ("get", "/readyz")):
        reply = document["paths"][path][method]["responses"]["200"]
        reply["content"] = {"application/json": {"schema": {"type": "object"}}}
    document["paths"]["/readyz"]["get"]["responses"]["503"]["content"] = {
        "application/json": {"schema": {"type": "object"}}
    }
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": {"type": "string"}}
    app.openapi_schema = document
