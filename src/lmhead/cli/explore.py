"""`lmhead explore`: the page in the browser."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lmhead.cli.options import Device, Dtype, Json, ModelArgument, ModelOption, one_model
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress


def explore(
    model: ModelArgument = None,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="The prompt to start with.")
    ] = "The capital of France is",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 picks any free port.")
    ] = 8400,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    steer: Annotated[
        list[Path] | None,
        typer.Option(
            "--steer",
            metavar="VECTOR",
            help="A steering vector to offer on the page; may be repeated.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE.html", help="Write the page to one file, then exit."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    model_option: ModelOption = None,
    json: Json = False,
) -> None:
    """Explore a model in the browser: next token, funnel, lens, reasons, steering, size.

    The page is reachable from this machine only and loads nothing from elsewhere. It opens at once
    and shows how far the model has loaded. Press Ctrl-C to stop.
    """
    began = time.monotonic()
    named = one_model(model, model_option, DEFAULT_MODEL)
    from lmhead.files.whole import refuse_existing
    from lmhead.serve.page.run import check_extra, listening

    check_extra()
    if not prompt:
        raise BadInput("the prompt is empty; expected some text", names=["prompt"])
    for path in steer or ():
        if not path.is_file():
            raise BadInput(f"there is no vector at {path}; name its file", names=["steer"])
    if export is not None:
        if export.suffix.lower() not in (".html", ".htm"):
            raise BadInput(f"the file is {export.name}; expected a name that ends in .html")
        refuse_existing(export, force=force, folder=False)
        _export(named, prompt, export, device, dtype, json)
        return
    taken = listening(port)
    url = f"http://localhost:{taken.getsockname()[1]}/"
    address = url if prompt == "The capital of France is" else f"{url}#{_quoted(prompt)}"
    from lmhead.cli import render
    from lmhead.serve.page.run import serve

    def make(server: str, progress: Progress) -> Any:
        from lmhead.cli.starting import starting

        with starting():
            from lmhead.loading import load
            from lmhead.serve.page.app import make_app

            loaded = load(named, device=device, dtype=dtype, progress=progress)
            return make_app(loaded, steer or (), server)

    def opened() -> None:
        if not json:
            render.note(f"{address} is open; the model is being loaded")
        if browser:
            import webbrowser

            webbrowser.open(address)

    def ready() -> None:
        seconds = time.monotonic() - began
        if json:
            render.print_json({"url": address, "model": named, "seconds": seconds})
        else:
            render.say(f"{named} is at {address} (Ctrl-C ends it)")

    try:
        serve(make, taken, progress=render.progress, opened=opened, ready=ready)
    finally:
        if render.err().is_terminal:  # the bar of a model that Ctrl-C left half loaded hid it
            render.err().show_cursor(True)


def _quoted(prompt: str) -> str:
    from urllib.parse import urlencode

    return urlencode({"prompt": prompt})


def _export(
    model: str, prompt: str, path: Path, device: str | None, dtype: str | None, json: bool
) -> None:
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.serve.page.run import export

    loaded = load(model, device=device, dtype=dtype, progress=render.progress)
    export(loaded, path, prompt, state=_quoted(prompt), progress=render.progress)
    if json:
        render.print_json({"file": str(path), "model": loaded.name, "bytes": path.stat().st_size})
    else:
        render.say(f"wrote {path} ({render.size(path.stat().st_size)})")
