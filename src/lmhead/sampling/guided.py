"""Text held to a JSON schema, a regular expression or a Lark grammar, by llguidance.

A `Guide` is compiled once per grammar; each sequence then has a `GuideState` of its own that
says which tokens may come next and is told which one did. Where the grammar leaves only one text
to go on with, only the tokenizer's own way to write it is allowed. Needs the extra `guided`.
"""

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import BadInput, LMHeadError, MissingExtra, how_to_install
from lmhead.files import limits
from lmhead.files.jsons import is_unicode

# one line break with its indentation, or one space: a hot sampler must not wander off in blanks
WHITESPACE = r"(\n[ ]{0,12}|[ ]?)"
FIELDS = ("json_schema", "regex", "grammar")
# llguidance follows rules that name rules by recursion, some 5 kB of stack for each, and a thread
# that runs out of stack ends the process. The longest chain that fits into limits.GRAMMAR needs
# 200 MB. What is not touched takes no memory.
_STACK = 2**29  # bytes
_PAUSES = (0.0, 0.01, 0.05, 0.2)  # seconds before each try to start that thread
_STARTING = threading.Lock()
_T = TypeVar("_T")


class GuideState:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """True when the grammar is complete and nothing but a stop id could follow."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """True when the text so far already satisfies the grammar (more may still follow)."""
        return bool(self._matcher.is_accepting())

    def mask(self, V: int) -> Tensor:
        """Tell which tokens may come next, `[V]` bool; rows beyond the tokenizer may not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[:V].astype(bool)
        return torch.from_numpy(np.pad(allowed, (0, V - len(allowed))))

    def accept(self, token: int) -> None:
        """Advance by the token that was drawn; a complete grammar takes no notice of more."""
        if self.finished:
            return
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> "GuideState":
        """Copy the state: what the copy accepts does not move this one."""
        return GuideState(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadInput(f"the grammar cannot continue: {_one_line(self._matcher.get_error())}")


class Guide:
    """A compiled grammar over a tokenizer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> GuideState:
        """Begin a sequence."""
        return GuideState(self._matcher.deep_copy())

    def satisfied_by(self, ids: Sequence[int]) -> bool:
        """Tell whether `ids` say all that the grammar asks for (it may still allow more)."""
        state = self.start()
        for token in ids:
            state.accept(token)
        return state.finished or state.accepting


def compile_guide(
    tokenizer: Any,
    *,
    json_schema: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Guide:
    """Compile one of json_schema, regex and (Lark) grammar for a tokenizer.

    tokenizer: a fast tokenizer of transformers, a `tokenizers.Tokenizer`, or the path of a
    tokenizer.json. stop_ids may end the text besides the tokenizer's own end of text.
    """
    lib = _llguidance()
    kind, source = _source(json_schema, regex, grammar)
    wrapped = _wrapped(tokenizer, tuple(stop_ids))
    matcher = _on_a_deep_stack(lambda: lib.LLMatcher(wrapped, source, log_level=0))
    if matcher.is_error():
        raise _unusable(kind, matcher.get_error())
    return Guide(matcher)


def check_guide(
    *,
    json_schema: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> None:
    """Refuse a grammar that cannot be used, and a missing extra, without a tokenizer."""
    if json_schema is None and regex is None and grammar is None:
        return
    lib = _llguidance()
    kind, source = _source(json_schema, regex, grammar)
    if error := _on_a_deep_stack(lambda: lib.LLMatcher.validate_grammar(source)):
        raise _unusable(kind, error)


def _source(
    json_schema: str | Mapping[str, Any] | None, regex: str | None, grammar: str | None
) -> tuple[str, str]:
    """Give the name of the one grammar that was given, and llguidance's form of it."""
    lib = _llguidance()
    given = [g for g in (json_schema, regex, grammar) if g is not None]
    if len(given) != 1:
        raise BadInput(
            f"{len(given)} grammars given; expected one of json_schema, regex, grammar",
            names=FIELDS,
        )
    if json_schema is not None:
        text = _bounded("json_schema", _schema_text(json_schema))
        defaults = {"whitespace_pattern": WHITESPACE}
        try:
            made = lib.LLMatcher.grammar_from_json_schema(text, defaults=defaults)
        except (ValueError, TypeError) as error:
            raise _unusable("json_schema", str(error)) from error
        return "json_schema", made
    if regex is not None:
        return "regex", lib.LLMatcher.grammar_from_regex(_bounded("regex", regex))
    return "grammar", lib.LLMatcher.grammar_from_lark(_bounded("grammar", grammar))


def _on_a_deep_stack(work: Callable[[], _T]) -> _T:
    """Do some work in a thread that a deeply nested grammar cannot bring down."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STARTING:
        before = threading.stack_size(_STACK)
        try:
            thread = _started(run)
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()


def _started(run: Callable[[], None]) -> threading.Thread:
    """Start a thread; a process short of address space may have to wait for the last one's stack.

    `join` returns a moment before the system takes a thread's stack back.
    """
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            thread = threading.Thread(target=run, name="lmhead-grammar")
            thread.start()
        except RuntimeError:
            continue
        return thread
    raise LMHeadError(
        f"there is no room for a thread with {_STACK >> 20} MB of stack, which compiling a grammar "
        "needs; raise the process's limit on virtual memory (`ulimit -v`) or on threads (`-u`)"
    )


def _bounded(name: str, value: Any) -> str:
    """Return a text that is a text, of a size that can be compiled."""
    if not isinstance(value, str):
        raise BadInput(f"{name} is {value!r}; expected a text", names=[name])
    if len(value) > limits.GRAMMAR:
        raise BadInput(
            f"{name} has {len(value):,} characters; expected at most {limits.GRAMMAR:,}",
            names=[name],
        )
    if not is_unicode(value):
        raise BadInput(
            f"{name} holds half of a surrogate pair, which is not a character", names=[name]
        )
    return value


def _unusable(kind: str, error: str) -> BadInput:
    return BadInput(f"the {kind} cannot be used: {_one_line(error)}")


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra(
            "json_schema, regex and grammar need llguidance; install it with: "
            + how_to_install("guided"),
            names=FIELDS,
        ) from error
    module: ModuleType = llguidance
    return module


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(
            f"json_schema is {_short(str(schema))}, which is not JSON ({error}); expected a JSON "
            "schema",
            names=["json_schema"],
        ) from error
    if not isinstance(value, Mapping):
        raise BadInput(
            f"json_schema is {_short(text)}; expected an object, as a JSON schema is",
            names=["json_schema"],
        )
    return text


# reading a tokenizer takes about a second at 262,144 tokens
_WRAPPED: "weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]]" = weakref.WeakKeyDictionary()


def _wrapped(tokenizer: Any, stop_ids: tuple[int, ...]) -> Any:
    if isinstance(tokenizer, str | Path):
        return _from_file(str(tokenizer), stop_ids)
    if not hasattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "to_str"):
        raise BadInput(
            f"{type(tokenizer).__name__} is not a fast tokenizer; expected one of transformers or "
            f"of tokenizers, or the path of a tokenizer.json"
        )
    known = _WRAPPED.setdefault(tokenizer, {})
    if stop_ids not in known:
        known[stop_ids] = _wrap(tokenizer, stop_ids)
    return known[stop_ids]


@functools.lru_cache(maxsize=4)
def _from_file(path: str, stop_ids: tuple[int, ...]) -> Any:
    import tokenizers

    try:
        return _wrap(tokenizers.Tokenizer.from_file(path), stop_ids)
    except Exception as error:  # tokenizers raises bare Exception
        raise BadInput(f"{path} is not a tokenizer.json: {_one_line(str(error))}") from error


def _wrap(tokenizer: Any, stop_ids: tuple[int, ...]) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    end = getattr(tokenizer, "eos_token_id", None)
    ends = list(dict.fromkeys(([] if end is None else [end]) + list(stop_ids)))
    plain = type(backend).from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    return _llguidance().LLTokenizer(plain.to_str(), eos_token=ends or None)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _one_line(text: str) -> str:
    return " ".join(text.split())
