"""Who is let in, and what every reply carries.

Whoever runs a page elsewhere can make a browser send requests to this machine. So the Host must
name this machine (a foreign name that was made to point here does not), and an Origin must be our
own. Every reply carries the id of this run of the server: a page that sees another one knows that
the server was restarted.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Door:
    """Turns away who does not belong here, and puts the headers on every reply.

    It passes streams on as they come, and lets the application see that a browser has gone.
    """

    def __init__(self, app: ASGIApp, server: str) -> None:
        self.app = app
        self.headers = [
            (name.lower().encode(), value.encode())
            for name, value in {**HEADERS, "X-Lmhead-Server": server}.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
                if not any(name == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        if why := refused(Request(scope)):
            await error_reply(403, why)(scope, receive, marked)
        else:
            await self.app(scope, receive, marked)


def refused(request: Request) -> str | None:
    """Say why a request is none of our own page's; None where it is."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name not in LOOPBACK:
        return f"the host is {host!r}; open the page as http://localhost"
    if origin is not None and origin != f"http://{host}":
        return f"the origin is {origin!r}; this server answers its own page"
    if site not in ("same-origin", "none") and request.url.path != "/":
        return "the request comes from another site; this server answers its own page"
    return None


def error_reply(status: int, message: str) -> JSONResponse:
    """Say what went wrong, as the page reads it."""
    return JSONResponse({"error": message}, status_code=status)
