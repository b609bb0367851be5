"""`/docs`: the OpenAPI document as a plain page, without scripts and without anything from outside.

A browser that opens it asks nobody but this server.
"""

from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616 }
  code, summary { background: #262626 } }
code { background: #f2f2f2; padding: .1em .3em; border-radius: 3px }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top;
  padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #8884 }
summary { cursor: pointer; padding: .4rem; background: #f2f2f2; border-radius: 3px }
details { margin: .5rem 0 }
"""


def html_of(document: dict[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    schemas = document.get("components", {}).get("schemas", {})
    about = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(about['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(about['title'])}</h1><p>{escape(about.get('description', ''))}</p>",
        "<p>The same as <a href='openapi.json'>openapi.json</a>.</p><h2>Addresses</h2>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h2>Objects</h2>")
    for name, schema in sorted(schemas.items()):
        parts.append(_schema(name, schema))
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = []
    for place in operation.get("requestBody", {}).get("content", {}).values():
        rows.append(("body", _kind(place["schema"])))
    for status, reply in operation.get("responses", {}).items():
        kinds = [_kind(c.get("schema", {})) for c in reply.get("content", {}).values()]
        rows.append((status, " or ".join(kinds)))
    table = "".join(f"<tr><th>{escape(a)}<td>{b}" for a, b in rows)
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f"{escape(operation.get('summary', ''))}</summary>"
        f"<p>{escape(operation.get('description', ''))}</p><table>{table}</table></details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", [])
    rows = []
    for field, kind in schema.get("properties", {}).items():
        mark = " (required)" if field in needed else ""
        said = escape(kind.get("description", ""))
        rows.append(f"<tr><td><code>{escape(field)}</code>{mark}<td>{_kind(kind)}<td>{said}")
    return (
        f"<details id='{escape(name)}'><summary><code>{escape(name)}</code> "
        f"{escape(schema.get('description', ''))}</summary>"
        f"<table>{''.join(rows)}</table></details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """Write the kind of a value in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(repr(v)) for v in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to",
              "exclusiveMaximum": "below"}  # fmt: skip
    said = [f"{word} {schema[key]:g}" for key, word in limits.items() if key in schema]
    return escape(" ".join([str(kind), *said]))
