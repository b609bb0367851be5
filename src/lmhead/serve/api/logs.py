"""One line of JSON on stderr for every request; what people write is not in it unless asked for."""

import json
import logging
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lmhead.serve.api.metrics import Metrics

log = logging.getLogger("lmhead.serve")


class Lines(logging.Formatter):
    """Writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "logged", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Logged:
    """Counts and logs every request that is answered; gives each an id."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths
        self.state: Any = None  # of the app inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and tell how it went."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, id = time.perf_counter(), 0, uuid.uuid4().hex
        scope.setdefault("state", {})["logged"] = {}

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = scope["path"]
            known = path if path in self.paths else _family(path)
            self.metrics.requests.labels(known, str(status)).inc()
            logged = {
                "id": id,
                "method": scope["method"],
                "path": known,
                "status": status,
                "ms": round(1000 * (time.perf_counter() - began), 1),
                **scope["state"]["logged"],
            }
            log.info("request", extra={"logged": logged})


def _family(path: str) -> str:
    """Name an address without what a client put into it."""
    for start in ("/v1/steering/", "/v1/models/"):
        if path.startswith(start):
            return f"{start}{{name}}"
    return "other"
