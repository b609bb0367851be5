"""Results as HTML, for notebooks and for files that are read offline: one look for all of them.

Nothing is loaded from elsewhere, and no script is needed. What a result shows in a notebook
(`_repr_html_`) is a table of this file; `page` makes a whole document of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = (
    "table.lmhead{border-collapse:collapse;font:13px/1.5 system-ui,sans-serif}"
    "table.lmhead caption{text-align:left;font-weight:600;padding:4px 0}"
    "table.lmhead td,table.lmhead th{padding:2px 8px;text-align:right;white-space:pre;border:0}"
    "table.lmhead td:first-child,table.lmhead th:first-child{text-align:left}"
    "table.lmhead tr{background:none}"
)
_PAGE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.7 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.3rem}"
)


@dataclass(frozen=True)
class Cell:
    """A text with a colour behind it: from -1 (red) over 0 (none) to 1 (blue)."""

    text: str
    shade: float = 0.0
    title: str = ""  # shown when the mouse rests on it


def colour(shade: float) -> str:
    """Return the colour behind a shade from -1 (red) to 1 (blue), seen on light and dark alike."""
    strength = min(1.0, abs(shade))
    return f"rgba({'43,108,176' if shade > 0 else '200,68,47'},{0.55 * strength:.3f})"


def visible(text: str) -> str:
    """Show the spaces and line ends of a token."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def table(head: Sequence[str], rows: Iterable[Sequence["str | Cell"]], *, caption: str = "") -> str:
    """Return a table; its first column is text, the others are numbers or cells."""
    parts = [f"<style>{_STYLE}</style><table class='lmhead'>"]
    if caption:
        parts.append(f"<caption>{escape(caption)}</caption>")
    parts.append("<tr>" + "".join(f"<th>{escape(visible(name))}</th>" for name in head) + "</tr>")
    for row in rows:
        parts.append("<tr>" + "".join(map(_cell, row)) + "</tr>")
    parts.append("</table>")
    return "".join(parts)


def _cell(cell: "str | Cell") -> str:
    if isinstance(cell, str):
        return f"<td>{escape(visible(cell))}</td>"
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    back = f' style="background:{colour(cell.shade)}"' if cell.shade else ""
    return f"<td{back}{title}>{escape(visible(cell.text))}</td>"


def spans(cells: Iterable[Cell]) -> str:
    """Return running text, each piece with its colour and its title."""
    parts = []
    for cell in cells:
        title = f' title="{escape(cell.title)}"' if cell.title else ""
        back = f' style="background:{colour(cell.shade)}"' if cell.shade else ""
        parts.append(f"<span{back}{title}>{escape(cell.text)}</span>")
    text = "".join(parts)
    return f'<div class="lmhead" style="white-space:pre-wrap;line-height:1.8">{text}</div>'


def page(title: str, body: str) -> str:
    """Return a whole document that works offline."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_PAGE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )
