"""What of a model folder a trim has to know: tokenizer, rows, and every id that is named somewhere.

Ids stand in config.json, generation_config.json and tokenizer_config.json; the chat template needs
tokens of its own, in branches that an ordinary conversation never takes.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmhead.errors import BadCheckpoint, BadInput, UnsupportedModel
from lmhead.files.checkpoint import Checkpoint, open_checkpoint
from lmhead.models.architecture import find_head
from lmhead.models.reading import read_tokenizer
from lmhead.models.templates import render
from lmhead.trim.plain_tokenizer import PlainTokenizer
from lmhead.trim.tokenizer import TokenizerJson

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_ONE = ("_token_id", "_token_index")  # keys that end so hold an id or a list of ids
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_WORDS = ("bad_words_ids", "force_words_ids")
_ROLES = ("system", "user", "assistant", "tool", "developer", "model", "function", "ipython")


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, opened for trimming."""

    folder: Path
    checkpoint: Checkpoint
    tokenizer: TokenizerJson
    rows: int  # of the head
    plain: bool = False  # without transformers, where the files of the tokenizer say all

    @classmethod
    def open(cls, folder: Path, *, plain: bool = False) -> "ModelFolder":
        """Open a folder and read its headers; no weight is loaded."""
        checkpoint = open_checkpoint(folder)
        tokenizer = TokenizerJson.read(folder / "tokenizer.json")
        shapes = {name: header.shape for name, header in checkpoint.tensors.items()}
        found = find_head(shapes, checkpoint.config, str(folder))
        rows = shapes[found.weight][0]
        if shapes[found.embedding][0] != rows:
            raise UnsupportedModel(
                f"{folder} has a head of {rows:,} rows and an embedding of "
                f"{shapes[found.embedding][0]:,}; expected as many of each"
            )
        return cls(folder, checkpoint, tokenizer, rows, plain)

    def inside(self, path: Path) -> Path:
        """Return `path`, a file of this folder, or refuse one that lies outside of it.

        A link in a folder that somebody else made could name any file of this machine, which a trim
        would then publish. The links of a Hugging Face cache lead to its own blobs.
        """
        home, real = self.folder.resolve(), path.resolve()
        blobs = home.parent.parent / "blobs"
        cached = home.parent.name == "snapshots" and real.parent == blobs
        if not real.is_relative_to(home) and not cached:
            name = os.path.relpath(path.absolute(), self.folder.absolute())
            raise BadCheckpoint(
                f"{name} of {self.folder} lies outside of that folder (it is {real}), and a trim "
                "would publish it; put a copy in its place, or remove it"
            )
        return path

    @cached_property
    def hf_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer as transformers loads it."""
        if self.plain and (found := PlainTokenizer.of(self.folder, self.tokenizer)) is not None:
            return cast("PreTrainedTokenizerBase", found)
        return read_tokenizer(self.folder)

    @property
    def read_already(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer for a model of this folder; None: it is to be read by transformers yet."""
        return None if isinstance(self.hf_tokenizer, PlainTokenizer) else self.hf_tokenizer

    @cached_property
    def readings(self) -> "tuple[Tokenizer, ...]":
        """The tokenizers that people get from this folder: one, or two that differ.

        Some tokenizer classes of transformers rebuild parts of what tokenizer.json says; a trim
        must be exact for those who read the file and for those who read it through transformers.
        """
        plain = self.tokenizer.built
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is None or _how(plain) == _how(backend):
            return (plain,)
        other = type(plain).from_str(backend.to_str())
        other.no_truncation()
        other.no_padding()
        return plain, other

    def special_ids(self) -> set[int]:
        """Return every id that the configuration files name, and those of special tokens."""
        known = self.tokenizer.names
        ids: set[int] = set()

        def note(i: int) -> int:
            ids.add(i)
            return i

        remap_ids(self.checkpoint.config, note)
        remap_ids(self.checkpoint.generation_config, note)
        ids.update(i for i in self.hf_tokenizer.all_special_ids if i is not None)
        return {i for i in ids if i in known}

    def template_ids(self) -> set[int]:
        """Return the ids of everything that the chat template can write by itself."""
        texts = template_texts(self.hf_tokenizer)
        return {
            i
            for reading in self.readings
            for encoding in reading.encode_batch(texts, add_special_tokens=False)
            for i in encoding.ids
        }

    def required_ids(self) -> set[int]:
        """Return the ids that no trim may drop."""
        return set(self.tokenizer.always) | self.special_ids() | self.template_ids()


def _how(tokenizer: "Tokenizer") -> Any:
    """Return what decides how text is cut, without the vocabulary itself."""
    steps = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    model = tokenizer.model
    names = ("unk_token", "byte_fallback", "fuse_unk", "ignore_merges", "dropout", "unk_id")
    return (
        [None if step is None else step.__getstate__() for step in steps],
        type(model),
        [getattr(model, name, None) for name in names],
        {token.content for token in tokenizer.get_added_tokens_decoder().values()},
    )


def remap_ids(config: Mapping[str, Any], new: Callable[[int], int | None]) -> dict[str, Any]:
    """Return a copy of a configuration with every token id renumbered.

    `new` gives the new id, or None for an id that is gone: it leaves lists, and stays a single id's
    old value only where that was no id of the vocabulary anyway (-1, None).
    """
    return {key: _remap(key, value, new) for key, value in config.items()}


def names_ids(key: str) -> bool:
    """Tell whether a key of a configuration holds token ids."""
    return key.endswith(_ONE) or key in (*_LISTS, *_WORDS, "forced_decoder_ids", "sequence_bias")


def _remap(key: str, value: Any, new: Callable[[int], int | None]) -> Any:
    if isinstance(value, Mapping):
        return remap_ids(value, new)
    if key.endswith(_ONE):
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            mapped = new(value)
            return value if mapped is None else mapped
        if isinstance(value, list) and all(isinstance(i, int) for i in value):
            return [mapped for i in value if (mapped := new(i)) is not None]
    if key in _LISTS and isinstance(value, list):
        return [mapped for i in value if (mapped := new(i)) is not None]
    if key in _WORDS and isinstance(value, list):
        words = [[new(i) for i in word] for word in value]
        return [word for word in words if None not in word]
    if key == "forced_decoder_ids" and isinstance(value, list):
        return [[at, new(i)] for at, i in value]
    if key == "sequence_bias" and isinstance(value, list):
        pairs = [([new(i) for i in ids], bias) for ids, bias in value]
        return [[ids, bias] for ids, bias in pairs if None not in ids]
    return value


def template_texts(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return what the chat template writes: every literal in it, and some whole conversations."""
    template = tokenizer.chat_template
    if not template:
        return []
    sources = list(template.values()) if isinstance(template, dict) else [template]
    texts = [text for source in sources for text in _literals(source)]
    texts += [form.format(role) for role in _ROLES for form in ("{}", "{}\n", " {}", "\n{}")]
    texts += [text for source in sources for text in render_conversations(tokenizer, source)]
    return texts


def render_conversations(
    tokenizer: "PreTrainedTokenizerBase", template: str | None = None
) -> list[str]:
    """Render conversations of several shapes; those that the template refuses are left out."""
    shapes = (("user",), ("system", "user"), ("user", "assistant"), ("user", "assistant", "user"))
    words = {"system": "Be brief.", "user": "Hi", "assistant": "Yes."}
    conversations = [
        [{"role": role, "content": words[role] if filled else ""} for role in shape]
        for shape in shapes
        for filled in (True, False)
    ]
    rendered = []
    for messages in conversations:
        for prompt in (False, True):
            try:
                text = render(
                    tokenizer,
                    messages,
                    tokenizer.name_or_path or "this model",
                    chat_template=template,
                    add_generation_prompt=prompt,
                )
            except BadInput:
                continue  # some templates know no system message, or want other fields
            rendered.append(text)
    return rendered


def _literals(source: str) -> Iterator[str]:
    """Yield the text of a Jinja template in every branch, and the constants of its expressions."""
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """`{% generation %}`, with which transformers marks the assistant's words."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # The same options as transformers has, on which line ends depend; nothing is rendered here.
    environment = Environment(  # noqa: S701  # the text of a prompt, no HTML
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    try:
        tree = environment.parse(source)
    except (TemplateSyntaxError, RecursionError):
        return
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
