"""A tokenizer as transformers would load it, from its files alone.

Importing transformers takes longer than a trim with a ready keep-set.
Only where the files say all: a tokenizer that transformers takes from tokenizer.json as it is,
named special tokens that are in the vocabulary, and at most one chat template.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lmhead.errors import LMHeadError
from lmhead.files.jsons import read_json
from lmhead.trim.tokenizer import TokenizerJson

_AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_OTHERS = ("special_tokens_map.json", "additional_chat_templates", "added_tokens.json")


class PlainTokenizer:
    """What a trim asks of a tokenizer of transformers."""

    backend_tokenizer = None  # there is no other reading than tokenizer.json

    def __init__(self, folder: Path, tokenizer: TokenizerJson, config: Mapping[str, Any]) -> None:
        self.name_or_path = str(folder)
        self._tokenizer = tokenizer
        named = [_content(config.get(name)) for name in _NAMED]
        added = [t["content"] for t in tokenizer.data.get("added_tokens") or () if t["special"]]
        self.all_special_tokens = list(dict.fromkeys([*(t for t in named if t), *added]))
        self._named = {name: t for name, t in zip(_NAMED, named, strict=True) if t}
        file = folder / "chat_template.jinja"
        found = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        self.chat_template: str | None = found
        self._compiled: dict[str, Any] = {}

    @classmethod
    def of(cls, folder: Path, tokenizer: TokenizerJson) -> "PlainTokenizer | None":
        """Return the tokenizer of a folder, None where its files do not say all."""
        try:
            config = read_json(folder / "tokenizer_config.json")
            if config.get("tokenizer_class") not in _AS_IT_IS or "auto_map" in config:
                return None
            if any((folder / name).exists() for name in _OTHERS):
                return None
            made = cls(folder, tokenizer, config)
        except (OSError, LMHeadError, TypeError, KeyError, AttributeError):
            return None
        template = made.chat_template
        whole = template is None or (isinstance(template, str) and "generation %" not in template)
        known = all(token in tokenizer.vocab for token in made.all_special_tokens)
        return made if whole and known else None

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return [self._tokenizer.vocab[token] for token in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        """Return token to id."""
        return self._tokenizer.vocab

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Encode a text."""
        encoded = self._tokenizer.built.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    @cached_property
    def _environment(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=False, **options)

        made = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        made.filters["tojson"] = tojson
        made.globals["raise_exception"] = refuse
        made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return made

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
    ) -> str:
        """Write a conversation as the chat template has it."""
        if (source := chat_template or self.chat_template) is None:
            raise ValueError(f"{self.name_or_path} has no chat template")
        if (template := self._compiled.get(source)) is None:
            template = self._compiled[source] = self._environment.from_string(source)
        text = template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._named,
        )
        return str(text)


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None
