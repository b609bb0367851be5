"""A field that is wrong, in our words: what it is, what was expected; never a client's text."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError

from lmhead.serve.api.errors import Json, Refused, reply_of

# by the kind of pydantic's error: what was expected
_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "string_too_short": "at least {min_length}",
    "string_too_long": "at most {max_length}",
}
# fields that may be several things: pydantic tells of each that it is not that one
_SEVERAL = {
    "prompt": "a text, a list of ids, or a list of either",
    "stop": "a text or a list of texts",
    "order": "hf, vllm, llama.cpp or a list of filters",
    "json_schema": "an object, or its text",
    "content": "a text or a list of parts",
    "choices": "a list of texts, or a list of lists of ids",
    "token": "a text or an id",
}
_COUNTED = {"too_short": "entries", "too_long": "entries",
            "string_too_short": "characters", "string_too_long": "characters"}  # fmt: skip


async def invalid(request: Request, error: Exception) -> Json:
    """Answer a request whose body does not hold what it must."""
    assert isinstance(error, RequestValidationError)
    return reply_of(refusal_of(error, request.headers.get("content-type", "")))


def refusal_of(error: RequestValidationError, kind: str) -> Refused:
    """Say what is wrong with a body; `kind` is its content type."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refused(400, "the body is no JSON; expected one JSON object", code="invalid_json")
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if not where:
        return Refused(400, _no_object(first.get("input"), kind))
    # what follows the name of such a field says which of the things pydantic tried
    several = next((i for i, part in enumerate(where) if part in _SEVERAL), None)
    field = where[0]
    if several is not None and first["type"] != "missing":
        where = where[: several + 1]
        message = f"{_place(where)} is wrong; expected {_SEVERAL[where[-1]]}"
    else:
        message = f"{_place(where)} {_said(first)}"
    return Refused(400, message, param=_ascii(field)[:60])


def _no_object(got: Any, kind: str) -> str:
    if got is None or got == b"":
        return "the body is empty; expected one JSON object"
    if "json" not in kind.lower():
        return "the Content-Type is not application/json; send it with that"
    return f"the body is {_shown(got)}; expected one JSON object"


def _said(error: Mapping[str, Any]) -> str:
    kind, got = str(error["type"]), error.get("input")
    if kind == "missing":
        return "is missing"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"is wrong: {_ascii(str(error['msg']))[:200].removeprefix('Value error, ')}"
    limits = error.get("ctx", {}).items()
    expected = expected.format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in limits})
    if kind == "literal_error" and isinstance(got, str):
        return f"is none that is known; expected {expected}"
    if kind in _COUNTED:
        return f"has {len(got or ()):,} {_COUNTED[kind]}; expected {expected}"
    return f"is {_shown(got)}; expected {expected}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return "a very large number" if abs(value) >= 1e18 else f"{value}"
    for kind, name in ((str, "a text"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "no such thing"


def _place(parts: list[str]) -> str:
    return _ascii(".".join(part[:60] for part in parts))


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
