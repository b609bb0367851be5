"""Which writing system a character belongs to, and which ones a language needs.

The first word of a letter's Unicode name is its script (GREEK SMALL LETTER ALPHA, HANGUL SYLLABLE
GA); digits, punctuation, symbols and combining marks go with every script.
"""

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

from lmhead.errors import BadInput

# Spelled otherwise in the names of the letters.
_ALIASES = {"han": ("cjk",), "chinese": ("cjk",), "kana": ("hiragana", "katakana")}
_JAPANESE = ("hiragana", "katakana", "cjk", "katakana-hiragana", "ideographic")
_KOREAN = ("hangul", "cjk")

SCRIPTS = frozenset(
    """
    arabic armenian bengali cherokee cjk cyrillic devanagari ethiopic georgian greek gujarati
    gurmukhi hangul hebrew hiragana kannada katakana khmer lao latin malayalam mongolian myanmar
    oriya sinhala syriac tamil telugu thaana thai tibetan bopomofo canadian yi coptic runic
    """.split()  # noqa: SIM905
)

LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        """
        af az bs ca cs cy da de en eo es et eu fi fil fr ga gl hr ht hu id is it la lb lt lv ms mt
        nl no pl pt ro sk sl so sq sv sw tl tr uz vi xh yo zu
        """.split(),  # noqa: SIM905
        ("latin",),
    ),
    **dict.fromkeys(["be", "bg", "kk", "ky", "mk", "mn", "ru", "tg", "uk"], ("cyrillic",)),
    **dict.fromkeys(["ar", "fa", "ps", "ug", "ur"], ("arabic",)),
    **dict.fromkeys(["hi", "mr", "ne", "sa"], ("devanagari",)),
    **dict.fromkeys(["he", "yi"], ("hebrew",)),
    **dict.fromkeys(["am", "ti"], ("ethiopic",)),
    **dict.fromkeys(["as", "bn"], ("bengali",)),
    "sr": ("cyrillic", "latin"),
    "el": ("greek",),
    "hy": ("armenian",),
    "ja": _JAPANESE,
    "ka": ("georgian",),
    "km": ("khmer",),
    "kn": ("kannada",),
    "ko": _KOREAN,
    "lo": ("lao",),
    "ml": ("malayalam",),
    "my": ("myanmar",),
    "or": ("oriya",),
    "pa": ("gurmukhi",),
    "gu": ("gujarati",),
    "si": ("sinhala",),
    "ta": ("tamil",),
    "te": ("telugu",),
    "th": ("thai",),
    "bo": ("tibetan",),
    "zh": ("cjk", "bopomofo", "ideographic"),
}


def scripts_of(names: Iterable[str], languages: Iterable[str] = ()) -> frozenset[str]:
    """Return the scripts that are named, directly or through languages (ISO 639-1 codes)."""
    found: set[str] = set()
    for name in names:
        word = name.strip().lower()
        if word not in SCRIPTS and word not in _ALIASES:
            raise BadInput(_unknown("script", name, SCRIPTS | set(_ALIASES)))
        found.update(_ALIASES.get(word, (word,)))
    for name in languages:
        word = name.strip().lower()
        if word not in LANGUAGES:
            raise BadInput(_unknown("language", name, frozenset(LANGUAGES)))
        found.update(LANGUAGES[word])
    return frozenset(found)


def _unknown(kind: str, name: str, known: frozenset[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"
    return f"there is no {kind} {name!r}; {hint}"


@lru_cache(maxsize=2**17)
def script_of(char: str) -> str | None:
    """Return the script of a character, None where it goes with every script."""
    if unicodedata.category(char)[0] in "PZC" or (char.isascii() and not char.isalpha()):
        return None
    try:
        words = unicodedata.name(char).lower().split()
    except ValueError:
        return "unknown"
    if words[0] in ("fullwidth", "halfwidth") and len(words) > 1:
        words = words[1:]
    if unicodedata.category(char) in ("Mn", "Lm", "Sk") and words[0] in ("combining", "modifier"):
        return None
    # Symbols and digits go with every script, unless they are named after one.
    return words[0] if words[0] in SCRIPTS or unicodedata.category(char)[0] == "L" else None


def is_written_in(text: str, scripts: frozenset[str]) -> bool:
    """Tell whether every character of a text belongs to the scripts, or goes with every script."""
    return all((script := script_of(char)) is None or script in scripts for char in text)
