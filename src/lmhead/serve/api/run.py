"""A socket to listen on, who may hold a connection, how it ends, and the log on stderr."""

import asyncio
import errno
import json
import logging
import socket
import sys
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lmhead.errors import BadInput
from lmhead.serve.api.errors import RETRY_AFTER, Refused, body_of
from lmhead.serve.api.logs import Lines, Logged
from lmhead.serve.api.settings import Settings

log = logging.getLogger("lmhead.serve")
IDLE = 30  # seconds that a connection may be open without a request
_REST = 5  # seconds for the last replies to be sent, once nothing runs any more
_Base: Any = AutoHTTPProtocol


class Runner(uvicorn.Server):
    """Runs an app until a signal; then no request is taken, and what runs may finish.

    What does not finish within `settings.drain` seconds is told so, as any other error is.
    """

    def __init__(self, app: Logged, settings: Settings, **options: Any) -> None:
        class Connection(_Connection):
            most = 2 * settings.max_connections  # beside open requests, those that are kept alive

        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=int(settings.drain) + _REST,
                ws="none",
                **options,
            )
        )
        self.worker, self.drain = app.state.server.worker, settings.drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the worker finish while replies are still sent, then close."""
        logged = {
            "running": self.worker.running,
            "waiting": self.worker.waiting,
            "drain": self.drain,
        }
        log.info("shutting down; once more to end at once", extra={"logged": logged})
        closing = asyncio.ensure_future(self.worker.close(self.drain))
        await super().shutdown(sockets)
        closing.cancel()


class _Connection(_Base):  # type: ignore[misc]
    """A connection that cannot be held open for nothing.

    uvicorn waits forever for a request's first lines, so whoever opens enough connections and says
    nothing would keep everybody else out. Here one that is idle goes after a while, and at once
    where somebody else needs its place.
    """

    most = 512

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take a new one; the one that is idle longest makes room for it."""
        super().connection_made(transport)
        self._since, self._seen = time.monotonic(), None
        self._look = self.loop.call_later(IDLE, self._close_idle)
        if len(self.connections) <= self.most:
            return
        idle = [one for one in self.connections if one is not self and not one._busy]
        if idle:
            min(idle, key=lambda one: one._since).transport.close()
        else:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        self._look.cancel()
        super().connection_lost(exc)

    @property
    def _busy(self) -> bool:
        """Tell whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _close_idle(self) -> None:
        if not self._busy and self.cycle is self._seen:  # nothing came since the last look
            self.transport.close()
            return
        self._since, self._seen = time.monotonic(), self.cycle
        self._look = self.loop.call_later(IDLE, self._close_idle)


def _full() -> bytes:
    error = Refused(503, "too many open connections; try again later", code="overloaded")
    body = json.dumps(body_of(error)[1]).encode("ascii")
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


_FULL = _full()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, or say why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host.strip("[]"), port))
        made.listen(128)
    except (OSError, OverflowError) as error:
        made.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(_cannot(host, port, error, why), names=["host", "port"]) from error
    made.set_inheritable(True)
    return made


def _cannot(host: str, port: int, error: Exception, why: str | None) -> str:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"something else listens on {host}:{port}; choose another port (0: any free one)"
    return f"cannot listen on {host}:{port} ({why}); choose another host or port"


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write one line of JSON for every request to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name in ("lmhead.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("lmhead.serve").setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
