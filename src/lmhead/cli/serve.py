"""`lmhead serve`: an OpenAI-style server of one model."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import (
    Body,
    Device,
    Dtype,
    Json,
    ModelArgument,
    ModelOption,
    choose_body,
    one_model,
)
from lmhead.errors import BadInput, MissingExtra, how_to_install
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.serve.api.logs import Logged


def serve(
    model: ModelArgument = None,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; one that other machines can reach needs a key."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks any free port.")] = 8401,
    engine: Annotated[
        str, typer.Option(help="dense, screened, max (for GPT-2), or auto: the fastest here.")
    ] = "auto",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env", metavar="NAME", help="The environment variable that holds the key."
        ),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            "--vectors",
            metavar="DIR",
            help="A folder of steering vectors, named after their files; uploads go there.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The name clients use for the model; MODEL by default."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many sequences run together.")] = 8,
    queue: Annotated[
        int, typer.Option(min=0, help="How many sequences may wait in the queue.")
    ] = 64,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The most tokens one choice may have.")
    ] = 4096,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="How many seconds a request may take.")
    ] = 600.0,
    drain: Annotated[
        float,
        typer.Option(min=0, help="How many seconds running requests get to finish at shutdown."),
    ] = 30.0,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Allow requests from web pages of this origin; may be repeated.",
        ),
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Also write prompts to the log.")
    ] = False,
    body: Body = "auto",
    device: Device = None,
    dtype: Dtype = None,
    model_option: ModelOption = None,
    json: Json = False,
) -> None:
    """Serve a model over HTTP to OpenAI clients: completions, chat, scores and steering.

    It listens on this machine only, unless you set `--host`. Ctrl-C or SIGTERM stops it once the
    running requests are finished. docs/serve.md has examples of clients.
    """
    served = one_model(model, model_option, DEFAULT_MODEL)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"lmhead serve needs {error.name}; install it with: {how_to_install('serve')}"
        ) from error
    from lmhead.generation.engines import check_engine
    from lmhead.serve.api.settings import LOCAL, Settings, check_exposed, check_key, is_loopback
    from lmhead.serve.api.vectors import check_folder

    key = _key(api_key_env)
    if key is not None:
        check_key(key, str(api_key_env))
    check_exposed(host, key)
    check_engine(engine)
    if engine == "max" and (vectors or device or dtype):
        raise BadInput("--engine max takes no --vectors, --device or --dtype; leave them out")
    if engine == "max" and body not in ("auto", "max"):
        raise BadInput(f"--engine max runs the blocks too; leave out --body {body}, or --engine")
    if vectors is not None:
        check_folder(vectors)
    settings = Settings(
        key=key,
        origins=tuple(cors or ()),
        hosts=(*LOCAL, host) if is_loopback(host) else None,
        vectors=vectors,
        max_tokens=max_tokens,
        time=timeout,
        drain=drain,
        log_prompts=log_prompts,
    )
    from lmhead.cli import render
    from lmhead.cli.starting import starting

    with starting():
        from lmhead.body.row_body import row_body
        from lmhead.generation.engines import engine as engine_of
        from lmhead.loading import load
        from lmhead.serve.api.app import create_app, warm_up
        from lmhead.serve.api.run import Runner, listen, log_to_stderr
        from lmhead.serve.threads import aside

        socket = listen(host, port)  # a port that is taken is said before the model is loaded
        body = "max" if engine == "max" else choose_body(body, served, device, dtype)

        def prepared() -> "tuple[str, Logged]":
            loaded = load(served, body=body, device=device, dtype=dtype, progress=render.progress)
            if batch_size > 1:
                loaded = replace(loaded, body=row_body(loaded.body))
            head = engine_of(loaded, engine, progress=render.progress)
            warm_up(loaded, head)
            return loaded.name, create_app(
                loaded, name=name, head=head, settings=settings, batch_size=batch_size, queue=queue
            )

        own_name, app = aside(prepared)
    log_to_stderr()
    at = socket.getsockname()
    shown = f"[{at[0]}]" if ":" in at[0] else at[0]
    url = f"http://{shown}:{at[1]}"
    if json:
        render.print_json({"url": url, "model": name or own_name, "pid": os.getpid()})
        sys.stdout.flush()  # who reads it through a pipe would wait for the end of the server
    else:
        render.note(f"serving {name or own_name} at {url}/v1; API docs at {url}/docs")
    Runner(app, settings).run(sockets=[socket])


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise BadInput(
            f"--api-key-env is {name}, but that environment variable is empty or not set"
        )
    return key
