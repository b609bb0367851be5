"""Text that others wrote, made safe to show: nothing in it moves the cursor or hides a part of it.

Names and metadata of a model come from its files. Control characters (escape sequences among
them), signs that turn the direction of a line round, and halves of surrogate pairs are shown by
their number.
"""

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNDER_WAY = re.compile(r"\.([^/\n]{1,200})\.lmhead-[0-9a-f]{16}(-old)?")


def plain(text: str) -> str:
    r"""Show what is not a sign of its own by its number: an escape becomes \x1b.

    What is under way has a hidden name (lmhead.files.whole); shown is the name that it will have.
    """
    return _UNSAFE.sub(_number, _UNDER_WAY.sub(r"\1", text))


def plain_json(text: str) -> str:
    r"""Do the same within JSON, where such a sign can only stand in a text: \u001b."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _number(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
