"""One way from a MODEL to something that answers: `load` gives body, head and tokenizer.

The body is everything below the head (`lmhead.body`); this file assembles and computes nothing.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmhead.body import Body, TorchBody
from lmhead.body.placing import device_of, dtype_of, model_of, placed_on
from lmhead.body.states import batches
from lmhead.errors import BadCheckpoint, BadInput, LMHeadError, LMHeadWarning, UnsupportedModel
from lmhead.files.checkpoint import open_checkpoint
from lmhead.files.jsons import is_unicode
from lmhead.head import LMHead
from lmhead.head.find.pretrained import causal_config, refuse_oversized
from lmhead.models.conversation import Conversation, wrapped
from lmhead.models.fetch import gguf_of, head_folder
from lmhead.models.reading import read_tokenizer, refusing
from lmhead.models.registry import BUILT_IN, DEFAULT_MODEL
from lmhead.models.resolve import as_path, local_source, resolve
from lmhead.models.words import Words
from lmhead.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BODIES = ("auto", "torch", "llama.cpp", "max")


@dataclass(frozen=True)
class Model(Words):
    """A model ready to use: its body, its head and its tokenizer."""

    name: str
    folder: Path | None  # None: it was in memory already
    body: Body
    head: LMHead
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def reachable(self) -> int:
        """How many of the head's rows have a token; the rows from here on are padding."""
        highest = max(self.tokenizer.get_vocab().values(), default=-1)
        return min(highest + 1, self.head.vocab_size)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text: those of the generation config, and the tokenizer's own."""
        config = self.body.generation_config or self.body.config
        given = getattr(config, "eos_token_id", None)
        ids = given if isinstance(given, list) else [given]
        return tuple(dict.fromkeys(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None))

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer knows how to wrap a conversation."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: str | Sequence[int], *, chat: bool = False) -> list[int]:
        """Turn a prompt into ids, wrapped in the chat template if requested, and check them.

        If the prompt is already a list of ids, they are only checked.
        """
        if not isinstance(prompt, str):
            return self._checked(prompt, chat)
        if not prompt:
            raise BadInput("the prompt is empty; expected some text")
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self.check_ids(self._ids(prompt))

    def encode_chat(self, messages: Conversation) -> list[int]:
        """Turn a conversation, messages of {role, content}, into the ids before the answer."""
        text = wrapped(self.tokenizer, messages, self.name)
        return self.check_ids(self._ids(text, add_special_tokens=False))

    def _ids(self, text: str, **options: bool) -> list[int]:
        if not is_unicode(text):
            raise BadInput("the prompt holds half of a surrogate pair; expected whole characters")
        with refusing(self._no_text):
            ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        return ids

    def _no_text(self, reason: str) -> LMHeadError:
        return BadCheckpoint(
            f"the tokenizer of {self.name} cannot read this text ({reason}); expected the "
            "tokenizer.json that belongs to the model"
        )

    def _checked(self, given: Any, chat: bool) -> list[int]:
        """Check a prompt that is said to be ids."""
        ids = given.tolist() if hasattr(given, "tolist") else given
        whole = isinstance(ids, list | tuple) and all(
            isinstance(i, int) and not isinstance(i, bool) for i in ids
        )
        if not whole:
            raise BadInput(f"the prompt is {_shown(given)}; expected a text, or a list of ids")
        if chat:
            raise BadInput("chat wraps a text, but the prompt is a list of ids; expected a text")
        rows = self._embedding_rows
        if wrong := [i for i in ids if not 0 <= i < rows]:
            raise BadInput(
                f"the prompt holds the id {wrong[0]:,}; {self.name} has ids from 0 to {rows - 1:,}"
            )
        return self.check_ids(list(ids))

    @property
    def _embedding_rows(self) -> int:
        return self.body.vocab_size

    def check_ids(self, ids: list[int]) -> list[int]:
        """Return `ids` if the model can read them; otherwise raise an error that says why not."""
        if not ids:
            raise BadInput("the prompt holds no token; expected text that the tokenizer knows")
        rows = self._embedding_rows
        if (highest := max(ids)) >= rows or min(ids) < 0:
            raise BadCheckpoint(
                f"the tokenizer of {self.name} gives id {highest:,}, but the embedding has only "
                f"{rows:,} rows; expected the tokenizer that belongs to the model"
            )
        if (context := self.body.context) and len(ids) > context:
            raise BadInput(
                f"the prompt has {len(ids):,} tokens, but {self.name} reads at most {context:,}; "
                "shorten it"
            )
        return ids

    def room(self, ids: list[int], max_tokens: int) -> int:
        """Return how many tokens can follow `ids`, at most `max_tokens` and at least 1."""
        context = self.body.context
        return min(max_tokens, max(1, context - len(ids))) if context else max_tokens

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text, without special tokens."""
        text = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def last_hidden(self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> Tensor:
        """Return what enters the head at the last position.

        `[d]` for one prompt, a text or ids; `[B, d]` for a list of prompts, in their order.
        """
        several = isinstance(prompts, list | tuple) and not all(isinstance(i, int) for i in prompts)
        with torch.no_grad():  # not inference_mode: the caller may go on with h as it likes
            if not several:
                ids = self.encode(prompts)  # type: ignore[arg-type]
                h, _ = self.body(torch.tensor([ids]), use_cache=False)
                return h[0, -1]
            found: dict[int, Tensor] = {}
            encoded = [(self.encode(prompt), 1) for prompt in prompts]  # type: ignore[arg-type]
            for batch in batches(encoded):
                h, _ = self.body(batch.ids, use_cache=False)
                found.update(zip(batch.rows.tolist(), batch.at_last(h), strict=True))
        return torch.stack([found[i] for i in range(len(encoded))])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load(
    model: "str | Path | Model | nn.Module" = DEFAULT_MODEL,
    *,
    tokenizer: "PreTrainedTokenizerBase | str | Path | None" = None,
    device: "str | torch.device | None" = None,
    dtype: "str | torch.dtype | None" = None,
    body: str | None = None,
    progress: Progress = silent,
) -> Model:
    """Load MODEL: a folder, a `.gguf` file, a built-in name or a Hugging Face id.

    - A transformers model that is already in memory is used as it is, with its `tokenizer`.
    - `tokenizer` replaces the one in the folder; it may itself be a folder.
    - `device` (`cpu`, `cuda`, ...) and `dtype` (`float32`, `bfloat16`, `float16`) set where and in
      which precision the model runs; the defaults are the CPU and the dtype that it is stored in.
    - `body` sets what runs the blocks: `torch` (transformers; the default), `llama.cpp` (extra
      `llamacpp`: a quantised `.gguf` file or built-in model, fast on a CPU), `max` (extra `max`: a
      GPT-2 as a Modular MAX graph), or `auto`: llama.cpp for a `.gguf` file if it is installed,
      otherwise torch.
    """
    check_body(body)
    placed = {"device": device, "dtype": dtype}
    if body == "auto":
        there = isinstance(model, Model | nn.Module)  # which body it has is settled
        body = None if there else chosen_body(model, device=device, dtype=dtype)
    if isinstance(model, Model):
        return _loaded_before(model, tokenizer, body, placed)
    if isinstance(model, nn.Module):
        return _in_memory(model, tokenizer, body, placed)
    if not isinstance(model, str | Path):
        raise BadInput(
            f"the model is a {type(model).__name__}; expected a folder, a .gguf file, a name, or "
            "a transformers model together with its tokenizer",
            names=["model", "tokenizer"],
        )
    where, what = device_of(device), dtype_of(dtype)
    if body in ("max", "llama.cpp") and (where, what) != (None, None):
        runs_in = "in float32" if body == "max" else "the file as it is stored"
        raise BadInput(
            f"device or dtype is given with body={body!r}, which runs {runs_in} on the CPU; leave "
            "them out, or leave out the body",
            names=["device", "dtype", "body"],
        )
    if body == "llama.cpp":
        return _by_llama_cpp(model, tokenizer, progress)
    folder = resolve(model, progress)
    # pickles, truncated files and headless models are refused before transformers loads them
    config = causal_config(checkpoint := open_checkpoint(folder))
    refuse_oversized(checkpoint)
    # and a tokenizer that cannot be read before gigabytes of weights are
    found = read_tokenizer(folder, config) if tokenizer is None else _given(tokenizer)
    runs = _max_body(folder, progress) if body == "max" else None
    with progress(f"loading {model}", total=None):
        runs = runs or TorchBody(placed_on(model_of(folder, config, what), where))
        head = LMHead.from_model(runs.model)
    return Model(str(model), folder, runs, head, found)


def check_body(name: str | None) -> None:
    """Refuse a name that is no body's."""
    if name not in (None, *BODIES):
        raise BadInput(f"body is {name!r}; expected one of {', '.join(BODIES)}", names=["body"])


def chosen_body(model: object, *, device: object = None, dtype: object = None) -> str:
    """Return the body that `auto` takes: llama.cpp for a `.gguf` file, where it is installed."""
    from lmhead.body.llama.library import is_installed

    if not isinstance(model, str | Path) or (device, dtype) != (None, None):
        return "torch"
    file = local_source(as_path(model))
    return "llama.cpp" if file is not None and file.is_file() and is_installed() else "torch"


def _by_llama_cpp(model: str | Path, tokenizer: Any, progress: Progress) -> Model:
    """Load a GGUF file: its blocks by llama.cpp, its head and its tokenizer by us."""
    from lmhead.body.llama.library import library
    from lmhead.body.llama_cpp import LlamaBody

    library()  # whether it is there at all is said before anything is read
    file = local_source(as_path(model))
    if file is None and str(model) in BUILT_IN:
        file = gguf_of(str(model), progress)
    if file is None or file.is_dir():
        raise BadInput(
            f"body is 'llama.cpp', which runs .gguf files, but the model is {str(model)!r}; "
            "expected a .gguf file or a built-in name, or body='torch'",
            names=["body", "model"],
        )
    folder = head_folder(file, progress)
    config = causal_config(open_checkpoint(folder))
    found = read_tokenizer(folder, config) if tokenizer is None else _given(tokenizer)
    with progress(f"loading {model}", total=None):
        head = LMHead.from_pretrained(folder)
        body = LlamaBody.from_folder(file, folder, config, head, progress)
    return Model(str(model), folder, body, head, found)


def _loaded_before(
    model: Model, tokenizer: Any, body: str | None, placed: Mapping[str, object]
) -> Model:
    """Return a model that is loaded already, with another tokenizer where one is given."""
    _refuse(placed, f"{model.name} is already loaded")
    if body is not None and body != _kind(model.body):
        raise BadInput(
            f"body is {body!r}, but {model.name} is already loaded with another body; load it by "
            "its name or folder",
            names=["body"],
        )
    return model if tokenizer is None else replace(model, tokenizer=_given(tokenizer))


def _kind(body: Body) -> str:
    """Return the name of what runs a body."""
    if isinstance(body, TorchBody):
        return "torch"
    return {"LlamaBody": "llama.cpp", "MaxBody": "max"}.get(type(body).__name__, "torch")


def _in_memory(
    model: nn.Module, tokenizer: Any, body: str | None, placed: Mapping[str, object]
) -> Model:
    """Take a model as it is: nothing of it is moved, converted or put into another mode."""
    kind = type(model).__name__
    _refuse(placed, f"the {kind} is in memory already, and would change for all who use it")
    if body not in (None, "torch"):
        raise BadInput(
            f"body is {body!r}, but the model is in memory already; load it by its name or folder",
            names=["body"],
        )
    if tokenizer is None:
        raise BadInput(
            f"the model is a {kind} without its tokenizer; expected both: "
            "tokenizer=AutoTokenizer.from_pretrained(...), or its folder",
            names=["tokenizer"],
        )
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModel(
            f"{kind} has no configuration or no embedding of transformers; expected a causal "
            "language model, as AutoModelForCausalLM loads it"
        )
    if model.training:
        problem = f"the {kind} is in training mode, where dropout draws other answers every time"
        warnings.warn(LMHeadWarning(f"{problem}; call model.eval() first"), stacklevel=3)
    name = getattr(model.config, "_name_or_path", "") or kind
    return Model(str(name), None, TorchBody(model), LMHead.from_model(model), _given(tokenizer))


def _refuse(placed: Mapping[str, object], why: str) -> None:
    if names := [name for name, value in placed.items() if value is not None]:
        raise BadInput(
            f"{' and '.join(names)} cannot be given: {why}; move it yourself with model.to(...), "
            "or load it by its name or folder",
            names=names,
        )


def _given(tokenizer: "PreTrainedTokenizerBase | str | Path") -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        if not Path(tokenizer).is_dir():
            raise BadInput(f"there is no tokenizer folder {tokenizer}", names=["tokenizer"])
        return read_tokenizer(Path(tokenizer))
    raise BadInput(
        f"the tokenizer is a {type(tokenizer).__name__}; expected one of transformers "
        "(AutoTokenizer.from_pretrained(...)), or its folder",
        names=["tokenizer"],
    )


@dataclass(frozen=True)
class HeadOnly(Words):
    """The head of a model, read without its body, and its tokenizer."""

    name: str
    folder: Path | None  # None: it was in memory already
    head: LMHead
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def reachable(self) -> int:
        """How many of the head's rows have a token; the rows from here on are padding."""
        highest = max(self.tokenizer.get_vocab().values(), default=-1)
        return min(highest + 1, self.head.vocab_size)


def load_head(model: "str | Path | Model", *, progress: Progress = silent) -> HeadOnly:
    """Read the head of MODEL alone, memory-mapped where it is stored as it is used."""
    if isinstance(model, Model):
        return HeadOnly(model.name, model.folder, model.head, model.tokenizer)
    folder = resolve(model, progress)
    with progress(f"reading the head of {model}", total=None):
        return HeadOnly(str(model), folder, LMHead.from_pretrained(folder), read_tokenizer(folder))


def _max_body(folder: Path, progress: Progress) -> Body:
    from lmhead.body.max_body import MaxBody

    return MaxBody.from_pretrained(folder, progress)
