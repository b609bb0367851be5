"""For the reference on the docs site: doctests in docstrings become code blocks."""

import re
from typing import Any

from griffe import Extension, Object

# From the first `>>>` to the next empty line: the calls and what they print.
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(Extension):
    """Fences the doctests of every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Put a fence around every doctest of a docstring."""
    return _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
