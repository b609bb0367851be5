"""Every error that a client is told: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from lmhead.errors import BadInput, LMHeadError, MissingExtra
from lmhead.serve.worker import Closed, QueueFull

log = logging.getLogger("lmhead.serve")

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER = 1  # seconds


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str = Field(description="invalid_request_error, rate_limit_error, server_error, ...")
    param: str | None = Field(description="The field that is wrong, where it is one.")
    code: str | None


class ErrorReply(BaseModel):
    """The form of every error."""

    error: ErrorBody


class Refused(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Json(JSONResponse):
    """JSON in ASCII, so that no text of a client can make it fail; NaN is a mistake of ours."""

    def render(self, content: Any) -> bytes:
        """Write the bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def body_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON object of an error; nothing of ours but its message."""
    status, param, code = 500, None, None
    message = "the server failed; its log says more"
    if isinstance(error, Refused):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, QueueFull):
        status, message, code = 429, str(error), "queue_full"
    elif isinstance(error, Closed):
        status, message, code = 503, str(error), "shutting_down"
    elif isinstance(error, MissingExtra):
        status, message, code = 400, str(error), "unsupported"
    elif isinstance(error, BadInput):
        status, message = 400, str(error)
        param = error.names[0] if error.names else None
    elif isinstance(error, LMHeadError):
        status, message = 400, str(error)
    if status == 500:
        log.error("failed", exc_info=error, extra={"logged": {"kind": type(error).__name__}})
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def reply_of(error: BaseException) -> Json:
    """Return the answer that tells of an error."""
    status, content = body_of(error)
    headers: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else {}
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return Json(content, status_code=status, headers=dict(headers))


def install_errors(app: FastAPI) -> None:
    """Let every error of an app have this form."""

    async def refused(_request: Request, error: Exception) -> Json:
        return reply_of(error)

    async def http(_request: Request, error: Exception) -> Json:
        assert isinstance(error, HTTPException)
        reply = reply_of(Refused(error.status_code, _said(error)))
        for name, value in (error.headers or {}).items():
            reply.headers[name] = value
        return reply

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(LMHeadError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, refused)


def _said(error: HTTPException) -> str:
    messages = {
        404: "there is no such address; see /docs",
        405: "this address does not take that method; see /docs",
        400: "the body cannot be read; expected one JSON object",
    }
    return messages.get(error.status_code, str(error.detail))
