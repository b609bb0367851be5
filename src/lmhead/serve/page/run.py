"""Serving the page on this machine, and writing it as one file."""

import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput, MissingExtra, how_to_install
from lmhead.progress import Progress, silent

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lmhead.loading import Model

PROMPT = "The capital of France is"
_HOST = "127.0.0.1"


def check_extra() -> None:
    """Refuse to begin where the extra `serve` is not installed."""
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise MissingExtra(
                f"the page needs fastapi and uvicorn, and one is missing ({name}); install them "
                f"with: {how_to_install('serve')}"
            )


def listening(port: int) -> socket.socket:
    """Take the port, 0 for any that is free, before a model is loaded."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((_HOST, port))
    except OSError as error:
        taken.close()
        raise BadInput(
            f"port {port} is taken or not allowed ({error.strerror}); give another --port, or 0 "
            "for any that is free",
            names=["port"],
        ) from error
    taken.listen(128)
    return taken


def serve(
    make: "Callable[[str, Progress], FastAPI]",
    taken: socket.socket,
    *,
    progress: Progress = silent,
    opened: Callable[[], None] = lambda: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer until Ctrl-C, from the first second on; `make` loads the model in a thread meanwhile.

    `opened` is called when the page can be opened, `ready` when every question can be answered.
    """
    import uvicorn

    from lmhead.serve.page.opening import Opening

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            opened()

    def end() -> None:
        server.should_exit = True

    opening = Opening(make, progress, ready, end)
    config = uvicorn.Config(
        opening, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="on"
    )
    server = Server(config)
    server.run(sockets=[taken])
    if opening.error is not None:
        raise opening.error


def export(
    model: "Model",
    path: Path,
    prompt: str = PROMPT,
    *,
    state: str = "",
    progress: Progress = silent,
) -> Path:
    """Write the page of a prompt as one HTML file that works without a server."""
    from lmhead.files.whole import written_whole
    from lmhead.serve.page.explorer import Explorer
    from lmhead.serve.page.export import exported, reply
    from lmhead.serve.page.sizes import coverage, size

    explorer = Explorer(model)
    read = explorer.read(prompt, [], False, None)
    ids = read["ids"]
    best = explorer.logits(ids).topk(2).indices.tolist()
    replies = [
        reply("/api/model", None, explorer.about),
        reply("/api/tokens", None, explorer.tokens),
        reply("/api/read", {"prompt": prompt, "more": [], "chat": False, "cut": None}, read),
        reply("/api/logits", {"ids": ids}, explorer.logits(ids).numpy().tobytes()),
        reply("/api/vectors", None, []),
        reply("/api/size", None, size(model)),
        reply("/api/lens", {"ids": ids, "token": None}, explorer.lens(ids, None, progress)),
        reply(
            "/api/why",
            {"ids": ids, "token": best[0], "against": best[1], "heads": False},
            explorer.why(ids, best[0], best[1], False, progress),
        ),
        reply("/api/coverage", {"text": None}, coverage(model, None, progress)),
    ]
    with written_whole(path, force=True) as staging:
        staging.write_text(exported(state, replies), encoding="utf-8")
    return path
