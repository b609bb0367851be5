"""What the page shows, as one HTML file that needs no server and no network.

The page's own scripts are put into one, in the order of their imports; a Content-Security-Policy
allows that one script and that one style sheet by their hashes, and nothing else. The replies that
the page had are kept beside them as data.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
FIRST = "main.js"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|const|class) (\w+)", re.MULTILINE)


def exported(state: str, replies: Sequence[Mapping[str, Any]]) -> str:
    """Return the file: `state` is the page's address behind the #, `replies` what was answered."""
    script = bundled()
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    data = json.dumps({"state": state, "replies": list(replies)}, ensure_ascii=False)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    page = _replaced(
        page,
        '<link rel="stylesheet" href="/static/style.css">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>',
    )
    page = _replaced(page, 'href="/static/icon.svg"', f'href="data:image/svg+xml;base64,{icon}"')
    # in a block of data, only the end of the block must not occur
    safe = data.replace("<", "\\u003c")
    return _replaced(
        page,
        '<script type="module" src="/static/main.js"></script>',
        f'<script type="application/json" id="exported">{safe}</script>\n<script>{script}</script>',
    )


def _replaced(page: str, old: str, new: str) -> str:
    before, found, after = page.partition(old)
    if not found:
        raise AssertionError(f"index.html has no {old}")
    return before + new + after


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundled() -> str:
    """Return the page's modules as one script: each in a function, what it exports returned."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in parts:
            return
        source = (STATIC / name).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(source):
            add(other)
        names = [found for _, found in _EXPORT.findall(source)]
        body = _IMPORT.sub(lambda m: f"const {{{_renamed(m[1])}}} = {_variable(m[2])};\n", source)
        body = _EXPORT.sub(r"\1 \2", body)
        parts[name] = (
            f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();"
        )

    add(FIRST)
    script = '"use strict";\n' + "\n".join(parts.values())
    return f"\n(() => {{\n{script}\n}})();\n".replace("</", "<\\/")


def _variable(name: str) -> str:
    return "module_" + name.removesuffix(".js")


def _renamed(names: str) -> str:
    return names.replace(" as ", ": ")


def reply(path: str, body: Any, value: Any) -> dict[str, Any]:
    """Return one reply as the page keeps it; bytes become base64."""
    if isinstance(value, bytes):
        return {"path": path, "body": body, "binary": base64.b64encode(value).decode()}
    return {"path": path, "body": body, "value": value}
