"""What stands before every answer: who may ask, how much, how many at once, and how long.

This is plain ASGI, because a middleware that wraps requests would hide when a client goes away.
"""

import asyncio
import hmac
import json
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lmhead.serve.api.errors import Refused, reply_of
from lmhead.serve.api.settings import Settings

OPEN = ("/healthz", "/readyz")  # what needs no key: they say nothing but yes or no


class Gate:
    """Lets through what the settings allow."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        origin = self._origin(headers)
        if origin is not None:
            send = _with_cors(send, origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _preflight(send, allowed=origin is not None)
            return
        if self.connections >= self.settings.max_connections:
            full = Refused(503, "too many open connections; try again later", code="overloaded")
            await reply_of(full)(scope, receive, send)
            return
        self.connections += 1
        try:
            self._check(scope, headers)
            body = await self._body(scope, headers, receive)
        except Refused as error:
            reply = reply_of(error)
            reply.headers["Connection"] = "close"  # what is left of the body is not waited for
            await reply(scope, receive, send)
            return
        except _GoneError:
            return
        else:
            await self.app(scope, _replayed(body, receive), send)
        finally:
            self.connections -= 1

    def _origin(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the origin of the page that asks, where it is one of those that may."""
        origin = headers.get(b"origin")
        named = [name.encode() for name in self.settings.origins]
        return origin if origin is not None and (origin in named or b"*" in named) else None

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        hosts = self.settings.hosts
        if hosts is not None:
            # a page elsewhere can let its own name point to this machine
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name not in hosts:
                raise Refused(403, "the Host header does not name this server; use its own address")
        if self.settings.key is None or scope["path"] in OPEN:
            return
        given = headers.get(b"authorization", b"")
        wanted = b"Bearer " + self.settings.key.encode()
        if not hmac.compare_digest(given, wanted):
            raise Refused(
                401,
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )

    async def _body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the body, as far as it may go and as long as it may take."""
        upload = scope["path"].startswith("/v1/steering")
        limit = self.settings.max_vector if upload else self.settings.max_body
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts, size, more = [], 0, True
        end = time.monotonic() + self.settings.body_time
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise Refused(408, "the body did not arrive in time", code="timeout") from None
            if message["type"] == "http.disconnect":
                raise _GoneError
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            more = message.get("more_body", False)
        body = b"".join(parts)
        if not upload:
            _check_text(body)
        return body


class _GoneError(Exception):
    """The client has gone."""


def _check_text(body: bytes) -> None:
    """Refuse what is not a text: bytes that are not UTF-8, and halves of characters in JSON."""
    try:
        text = body.decode("utf-8")
        if "\\ud" in text.lower():  # may be half of a surrogate pair, which no tokenizer reads
            json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise Refused(400, "the body is not UTF-8, or holds half a character") from None
    except (ValueError, RecursionError):
        return  # no JSON: said where it is read


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit:,} bytes; send less", code="too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read, then what comes: that the client went away."""
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _with_cors(send: Send, origin: bytes) -> Send:
    async def more(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            headers += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
            message = {**message, "headers": headers}
        await send(message)

    return more


async def _preflight(send: Send, allowed: bool) -> None:
    """Answer a browser that asks whether it may ask; it has no key yet."""
    headers = []
    if allowed:
        headers = [
            (b"access-control-allow-methods", b"GET, POST, PUT, DELETE"),
            (b"access-control-allow-headers", b"Authorization, Content-Type"),
            (b"access-control-max-age", b"600"),
        ]
    status = 204 if allowed else 403
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
