"""llama.cpp as a library, by the functions of llama-cpp-python: models, contexts, one pass.

Everything here is thin: pointers become objects that free themselves, return codes become errors.
What llama.cpp logs is kept for the message of the error, and not printed.

Symbols: n tokens in a pass, d the width of h.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch

from lmhead.errors import LMHeadError, MissingExtra, UnsupportedModel, how_to_install

PACKAGE = "llama-cpp-python"
TESTED = "0.3.36"
BATCH = 512  # tokens in one pass at most
_NEEDED = (
    "llama_backend_init", "llama_log_set", "llama_model_default_params",
    "llama_model_load_from_file", "llama_model_free", "llama_context_default_params",
    "llama_init_from_model", "llama_free", "llama_model_n_embd", "llama_model_n_layer",
    "llama_get_memory", "llama_memory_seq_rm", "llama_set_n_threads",
    "llama_memory_seq_pos_max",
    "llama_decode", "llama_get_embeddings", "llama_get_logits", "llama_set_adapter_cvec",
    "llama_state_seq_get_size", "llama_state_seq_get_data", "llama_state_seq_set_data",
    "llama_state_seq_get_size_ext",
    "llama_max_parallel_sequences", "llama_batch", "llama_log_callback",
)  # fmt: skip
_FIELDS = {
    "llama_context_params": ("n_ctx", "n_seq_max", "embeddings", "kv_unified", "flash_attn_type"),
    "llama_batch": ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"),
}
_ERROR = 4  # ggml's level of what went wrong
_F32, _F16 = 0, 1  # ggml's numbers of two types
_POOLING_NONE, _FLASH_OFF = 0, 0
_WINDOWS = 1  # llama.cpp's flag: what the layers with a sliding window remember, alone
_HEAD = 8  # bytes before the caches in what llama.cpp writes of a sequence
_INTS = ctypes.POINTER(ctypes.c_int32)

_messages: deque[str] = deque(maxlen=8)  # what llama.cpp said last of what went wrong

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def is_installed() -> bool:
    """Tell whether llama-cpp-python is there, without loading it."""
    from importlib.util import find_spec

    return find_spec("llama_cpp") is not None


@cache
def library() -> Any:
    """Return llama-cpp-python's functions, or say what is missing."""
    if not is_installed():
        raise MissingExtra(
            f"llama.cpp is not installed; install it with: {how_to_install('llamacpp')} "
            "(it is built on this machine: cmake and a C++ compiler are needed)"
        )
    try:
        found: Any = import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise LMHeadError(
            f"{PACKAGE} is installed but does not load ({error}); build it again on this machine: "
            f"pip install --force-reinstall --no-binary {PACKAGE} {PACKAGE}=={TESTED}"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(found, name)]
    for kind, fields in _FIELDS.items():
        there = {field[0] for field in getattr(getattr(found, kind, None), "_fields_", ())}
        missing += [f"{kind}.{name}" for name in fields if name not in there]
    if missing:
        raise LMHeadError(
            f"{PACKAGE} {version(PACKAGE)} has no {missing[0]}; expected one with the functions of "
            f"{TESTED}: pip install {PACKAGE}=={TESTED}"
        )
    found.llama_log_set(_listener(found), ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


def most() -> int:
    """Return how many sequences one context can have."""
    return int(library().llama_max_parallel_sequences())


@cache
def _listener(found: Any) -> Any:
    """Return the function that llama.cpp tells what it does; it lives as long as the library."""

    def listen(level: int, text: bytes, _data: Any) -> None:
        if level == _ERROR:
            _messages.append(text.decode("utf-8", "replace").strip())

    return found.llama_log_callback(listen)


def _reason() -> str:
    """Return what llama.cpp said first of what went wrong: later lines say only that it did."""
    return f" ({_messages[0].rpartition('error loading model: ')[2]})" if _messages else ""


class Loaded:
    """A GGUF file that llama.cpp has mapped; freed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        lib = library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        _messages.clear()
        self.path = path
        self.pointer = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise UnsupportedModel(
                f"llama.cpp cannot load {path}{_reason()}; load it with body='torch', or take a "
                f"{PACKAGE} that knows it (this is {version(PACKAGE)})"
            )
        finalize(self, lib.llama_model_free, self.pointer)
        self.width = int(lib.llama_model_n_embd(self.pointer))
        self.layers = int(lib.llama_model_n_layer(self.pointer))


class Context:
    """What llama.cpp remembers of so many sequences, each with `cells` cells of its own.

    `exact` keeps keys and values in float32 instead of float16.
    """

    def __init__(
        self, model: Loaded, cells: int, sequences: int = 1, *, exact: bool = False
    ) -> None:
        lib = library()
        params = lib.llama_context_default_params()
        self.cells, self.sequences = cells, sequences
        params.n_ctx, params.n_seq_max = cells * sequences, sequences
        params.n_batch = params.n_ubatch = BATCH
        # in a cache that all share, sums depend on where the others lie, and so does every rounding
        params.embeddings, params.kv_unified, params.no_perf = True, False, True
        params.pooling_type = _POOLING_NONE
        # flash attention adds up values in float16, in an order that depends on who runs beside
        params.flash_attn_type = _FLASH_OFF
        params.type_k = params.type_v = _F32 if exact else _F16
        params.n_threads = params.n_threads_batch = self._threads = torch.get_num_threads()
        _messages.clear()
        self.model = model
        self.pointer = lib.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise UnsupportedModel(
                f"llama.cpp cannot run {model.path} with {cells:,} cells{_reason()}; "
                "load it with body='torch'"
            )
        self._lib = lib
        self._freed = finalize(self, lib.llama_free, self.pointer)
        self._memory = lib.llama_get_memory(self.pointer)
        self._steered: object = None

    def free(self) -> None:
        """Give the memory back now."""
        self._freed()

    def read(self, given: "Floats | Ints", places: Sequence[int], ids: Sequence[int]) -> Floats:
        """Read n tokens, each at its place of the sequence with this id; return h `[n, d]`.

        `given` is what stands for the tokens: their ids `[n]`, or their embeddings `[n, d]`.
        """
        parts = [
            self._read(given[i : i + BATCH], places[i : i + BATCH], ids[i : i + BATCH])
            for i in range(0, len(places), BATCH)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, given: "Floats | Ints", places: Sequence[int], ids: Sequence[int]) -> Floats:
        lib, n = self._lib, len(places)
        if (threads := torch.get_num_threads()) != self._threads:  # as the caller has it now
            lib.llama_set_n_threads(self.pointer, threads, threads)
            self._threads = threads
        batch = lib.llama_batch()
        batch.n_tokens = n
        held: Any = np.ascontiguousarray(given)
        if held.dtype == np.float32:
            batch.embd = held.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            batch.token = held.ctypes.data_as(_INTS)
        own = np.asarray(ids, np.int32)
        at = own.ctypes.data + own.itemsize * np.arange(n, dtype=np.uintp)  # where each id lies
        ones, pos = np.ones(n, np.int32), np.asarray(places, np.int32)
        every = np.ones(n, np.int8)  # every token's h
        batch.pos, batch.n_seq_id = (x.ctypes.data_as(_INTS) for x in (pos, ones))
        batch.seq_id = at.ctypes.data_as(ctypes.POINTER(_INTS))
        batch.logits = every.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        _messages.clear()
        code = lib.llama_decode(self.pointer, batch)
        if code:
            raise LMHeadError(
                f"llama.cpp could not read {n} tokens (code {code}){_reason()}; "
                "run fewer sequences together, or load the model with body='torch'"
            )
        h = np.ctypeslib.as_array(lib.llama_get_embeddings(self.pointer), (n, self.model.width))
        return h.copy()  # llama.cpp writes the next pass there

    def forget(self, id: int) -> None:
        """Empty a sequence."""
        self._lib.llama_memory_seq_rm(self._memory, id, -1, -1)

    def copy(self, source: int, target: int) -> None:
        """Let an empty sequence be what another is."""
        # not llama_memory_seq_cp: it copies at the next pass, and nothing may change until then
        self._put(target, self._taken(source))

    def take_over(self, other: "Context", ids: Sequence[int]) -> None:
        """Read these sequences from another context of the same model, which has no more."""
        for id in ids:
            if self._lib.llama_memory_seq_pos_max(other._memory, id) < 0:
                continue  # a pass that failed left it empty
            held = other._taken(id)
            if other.sequences != self.sequences:
                first = len(held) - other._window(id)  # where the second of two caches begins
                held = _among(held, first, other.sequences, self.sequences)
            self._put(id, held)

    def _taken(self, id: int) -> bytearray:
        """Return what is remembered of a sequence, as llama.cpp writes it."""
        held = bytearray(self._lib.llama_state_seq_get_size(self.pointer, id))
        there = (ctypes.c_uint8 * len(held)).from_buffer(held)
        if self._lib.llama_state_seq_get_data(self.pointer, there, len(held), id) != len(held):
            raise LMHeadError(f"llama.cpp gave no memory of sequence {id}; please report this")
        return held

    def _put(self, id: int, held: bytearray) -> None:
        there = (ctypes.c_uint8 * len(held)).from_buffer(held)
        if not self._lib.llama_state_seq_set_data(self.pointer, there, len(held), id):
            raise LMHeadError(
                f"llama.cpp took no memory of sequence {id}{_reason()}; please report this"
            )

    def _window(self, id: int) -> int:
        """Return the bytes of a sequence in the cache of sliding windows; all, if there is one."""
        return int(self._lib.llama_state_seq_get_size_ext(self.pointer, id, _WINDOWS)) - _HEAD

    def steer(self, added: Floats | None) -> None:
        """Add row l - 1 of `[layers - 1, d]` to what block l puts out; None: nothing, anywhere.

        llama.cpp counts blocks as we do, from 0, and has no vector at block 0.
        """
        if added is self._steered:  # the very same one, which nobody changes
            return
        lib, d = self._lib, self.model.width
        if added is None:
            code = lib.llama_set_adapter_cvec(self.pointer, None, 0, d, -1, -1)
        else:
            data = added.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            last = self.model.layers - 1
            code = lib.llama_set_adapter_cvec(self.pointer, data, added.size, d, 1, last)
        if code:
            raise LMHeadError(f"llama.cpp refused the vectors (code {code}){_reason()}")
        self._steered = added


def _among(held: bytearray, second: int, old: int, new: int) -> bytearray:
    """Rewrite what is remembered of a sequence: it was one of `old`, and will be one of `new`.

    Of each cache (where some layers have a sliding window there are two) llama.cpp writes how many
    sequences there are, and for each how many cells follow: 0 for all others. So more of them are
    more zeros at its end.
    """
    parts = [held[_HEAD:second], held[second:]] if second > _HEAD else [held[_HEAD:]]
    for part in parts:
        if part[:4] != old.to_bytes(4, "little"):
            raise LMHeadError(
                f"{PACKAGE} {version(PACKAGE)} writes its memory in another way than {TESTED}: "
                f"pip install {PACKAGE}=={TESTED}"
            )
        part[:4] = new.to_bytes(4, "little")
        part += bytes(4 * (new - old))
    return held[:_HEAD] + b"".join(parts)
