"""Exact surgery on a `tokenizer.json`: fewer tokens, the same encoding of every text they hold.

What "exact" rests on, by the type of the model:

- BPE (byte-level or SentencePiece): every kept token brings its canonical tree; see `bpe`.
- Unigram: the best path of a text stays the best as long as its pieces stay, since no score changes
  and paths only go away. The score of an unknown character hangs on the lowest score of all pieces,
  so one piece with that score stays.
- WordPiece: the longest match at each place stays the longest as long as it stays.

And so that other text loses nothing: every symbol stays that can be the last resort (bytes, or
where there are none, every single character), and with Unigram and WordPiece every piece that
holds a character which has no piece of its own.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError, UnsupportedModel
from lmhead.files import limits
from lmhead.files.jsons import read_both
from lmhead.models.reading import refuse_charsmap, refusing
from lmhead.trim.bpe import Merges, byte_token, result_of, split_rule
from lmhead.trim.idmap import TrimMap

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REMEMBERED = 8  # closures: the same sets are asked for once for every coverage
_TYPES = ("BPE", "Unigram", "WordPiece")
# Post-processors that hold no id, and those whose ids `_remap_post_processor` knows.
_POST_PROCESSORS = {"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"}


@dataclass(frozen=True)
class TokenizerJson:
    """A parsed tokenizer.json that can be trimmed exactly."""

    data: Mapping[str, Any]
    where: str
    _closures: dict[frozenset[int], frozenset[int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def read(cls, path: Path) -> "TokenizerJson":
        """Read a tokenizer.json and refuse what cannot be trimmed exactly."""
        if not path.is_file():
            raise UnsupportedModel(
                f"{path.parent} has no tokenizer.json, the only tokenizer that can be trimmed; "
                "write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained()"
            )
        raw, data = read_both(path, limits.TOKENIZER_JSON)
        return cls.of(data, str(path), raw)

    @classmethod
    def of(
        cls, data: Mapping[str, Any], where: str = "tokenizer.json", text: str | None = None
    ) -> "TokenizerJson":
        """Take a parsed tokenizer.json and refuse what cannot be trimmed exactly.

        `text` is what `data` was parsed from, where that is at hand.
        """
        try:
            cls._refuse(data, where)
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, LMHeadError):
                raise
            raise BadCheckpoint(
                f"{where} is not built as a tokenizer.json is ({type(error).__name__}: "
                f"{str(error)[:100]}); fetch it again"
            ) from error
        made = cls(data, where)
        if text is not None:
            made.__dict__["text"] = text
        made.built  # noqa: B018  # what the library takes has the shape that we rely on
        return made

    @staticmethod
    def _refuse(data: Mapping[str, Any], where: str) -> None:
        model = data.get("model")
        if not isinstance(model, dict) or "vocab" not in model:
            raise BadCheckpoint(f"{where} has no model with a vocabulary; fetch it again")
        if not model["vocab"]:
            raise BadCheckpoint(f"{where} has an empty vocabulary; fetch it again")
        kind = _type_of(model)
        if kind not in _TYPES:
            why = (
                "every dropped word would become the unknown token"
                if kind == "WordLevel"
                else "how it encodes is not known here"
            )
            raise UnsupportedModel(
                f"{where} is of type {kind!r}, which cannot be trimmed exactly: {why}; "
                f"expected one of {', '.join(_TYPES)}"
            )
        if model.get("dropout"):
            raise UnsupportedModel(
                f"{where} has BPE dropout {model['dropout']}: it encodes at random, so no trim of "
                "it can be exact; set model.dropout to null"
            )
        for processor in _post_processors(data.get("post_processor")):
            if processor["type"] not in _POST_PROCESSORS:
                raise UnsupportedModel(
                    f"{where} has a post-processor of type {processor['type']!r}, whose ids "
                    f"cannot be renumbered; expected one of {', '.join(sorted(_POST_PROCESSORS))}"
                )

    @property
    def model(self) -> Mapping[str, Any]:
        """The `model` object."""
        model: Mapping[str, Any] = self.data["model"]
        return model

    @property
    def type(self) -> str:
        """BPE, Unigram or WordPiece."""
        return _type_of(self.model)

    @cached_property
    def model_vocab(self) -> dict[str, int]:
        """Token to id, without added tokens that stand outside the model."""
        vocab = self.model["vocab"]
        if isinstance(vocab, dict):
            return dict(vocab)
        return {piece: i for i, (piece, _score) in enumerate(vocab)}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token to id, added tokens included: as the tokenizers library numbers them."""
        return dict(self.built.get_vocab(with_added_tokens=True))

    @cached_property
    def names(self) -> dict[int, str]:
        """Id to token."""
        return {i: token for token, i in self.vocab.items()}

    @cached_property
    def model_names(self) -> dict[int, str]:
        """Id to token, without added tokens that stand outside the model."""
        return {i: token for token, i in self.model_vocab.items()}

    @cached_property
    def merges(self) -> Merges:
        """The merges of a BPE model."""
        try:
            return Merges.of(self.model, self._comes_out)
        except (KeyError, ValueError) as error:
            raise BadCheckpoint(
                f"{self.where} has a merge whose tokens are not all in its vocabulary ({error}); "
                "fetch it again"
            ) from error

    @property
    def _comes_out(self) -> Callable[[str, int], bool] | None:
        """What tells whether merges lead to a token, by the library; None where it would not do."""
        model: Any = self.built.model
        names = ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        if any(self.model.get(name) for name in names):
            return None

        def comes_out(token: str, token_id: int) -> bool:
            try:
                found = model.tokenize(token)
            except Exception:  # its unknown token is none of its tokens, say: then it is found out
                return False
            return len(found) == 1 and found[0].id == token_id

        return comes_out

    @cached_property
    def built(self) -> "Tokenizer":
        """The tokenizer itself, without truncation and padding."""
        return build(self.text, self.where)

    @cached_property
    def text(self) -> str:
        """The text of the file, on one line if it is ours: line breaks take a second."""
        with refusing(partial(_does_not_load, self.where)):
            return json.dumps(self.data, ensure_ascii=False)

    @cached_property
    def last_resort(self) -> frozenset[int]:
        """The ids without which some text would be lost: bytes, or single characters."""
        vocab = self.model_vocab
        if self.model.get("byte_fallback") and all(byte_token(b) in vocab for b in range(256)):
            return frozenset(vocab[byte_token(b)] for b in range(256))
        bytes_there = {vocab[byte_token(b)] for b in range(256) if byte_token(b) in vocab}
        prefix = self.model.get("continuing_subword_prefix") or ""
        suffix = self.model.get("end_of_word_suffix") or ""

        def bare(token: str) -> str:
            token = token.removeprefix(prefix) if len(token) > len(prefix) else token
            return token.removesuffix(suffix) if len(token) > len(suffix) else token

        whole = vocab if prefix or suffix else (token for token in vocab if len(token) == 1)
        alone = {token for token in whole if len(bare(token)) == 1}
        ids = bytes_there | {vocab[token] for token in alone}
        if self.type == "BPE":
            return frozenset(ids)  # a merged token is made of symbols, which are all kept
        for token, i in vocab.items():
            starts = not (prefix and token.startswith(prefix))
            needed = (
                (prefix if prefix and (at or not starts) else "") + char
                for at, char in enumerate(bare(token))
            )
            if any(symbol not in alone for symbol in needed):
                ids.add(i)
        return frozenset(ids)

    @cached_property
    def always(self) -> frozenset[int]:
        """The ids that every trim keeps: added tokens, the unknown token, the last resort."""
        ids = set(self.last_resort)
        added = (token["content"] for token in self.data.get("added_tokens") or ())
        ids.update(self.vocab[text] for text in added if text in self.vocab)  # "" is no token
        for token in _named_tokens(self.data):
            if token in self.vocab:
                ids.add(self.vocab[token])
        if self.type == "Unigram":
            vocab = self.model["vocab"]
            if self.model.get("unk_id") is not None:
                ids.add(self.model["unk_id"])
            ids.add(min(range(len(vocab)), key=lambda i: vocab[i][1]))
        return frozenset(ids)

    def closure(self, ids: Iterable[int]) -> frozenset[int]:
        """Return the smallest set of ids around `ids` that can be cut out exactly."""
        wanted = self.always.union(ids)
        if (known := self._closures.get(wanted)) is not None:
            return known
        if unknown := sorted(wanted - self.names.keys()):
            raise BadInput(
                f"the keep-set has {len(unknown):,} ids that no token belongs to, such as "
                f"{unknown[0]}; expected ids that {self.where} knows (0 to {max(self.names):,})"
            )
        if self.type != "BPE":
            return frozenset(wanted)
        closed = frozenset(self.merges.closure(wanted, self.model_names))
        while len(self._closures) >= _REMEMBERED:
            self._closures.pop(next(iter(self._closures)))
        self._closures[wanted] = closed
        return closed

    def tree(self, token_id: int) -> set[int]:
        """Return a token with all that it is made of."""
        if self.type == "BPE" and token_id in self.model_names:
            return self.merges.closure({token_id}, self.model_names)
        return {token_id}

    def cut(self, ids: TrimMap) -> "TokenizerJson":
        """Return the tokenizer of the kept ids, which must be closed (`closure`)."""
        lacking = self.closure(ids.kept) - set(ids.kept)
        if lacking:
            raise BadInput(
                f"the keep-set is not closed: it lacks {len(lacking):,} ids, such as "
                f"{min(lacking)}, that its tokens are made of; call closure() first"
            )
        data: dict[str, Any] = {k: v for k, v in self.data.items() if k != "model"}
        data = deepcopy(data)
        new = dict(zip(ids.kept, range(len(ids)), strict=True)).__getitem__
        data["model"] = self._cut_model(ids, new)
        for token in data.get("added_tokens") or ():
            token["id"] = new(self.vocab[token["content"]])
        for processor in _post_processors(data.get("post_processor")):
            _remap_post_processor(processor, new)
        if data.get("padding"):
            data["padding"]["pad_id"] = new(data["padding"]["pad_id"])
        trimmed = TokenizerJson(data, f"the trimmed {self.where}")
        expected = {self.names[i]: new(i) for i in ids.kept}
        if trimmed.vocab != expected:
            wrong = next(t for t in expected if trimmed.vocab.get(t) != expected[t])
            raise UnsupportedModel(
                f"{self.where} cannot be renumbered: the token {wrong!r} would get the id "
                f"{trimmed.vocab.get(wrong)} instead of {expected[wrong]}, because its added "
                "tokens lie between those of the model; use --form head"
            )
        return trimmed

    def _cut_model(self, ids: TrimMap, new: Callable[[int], int]) -> dict[str, Any]:
        model = dict(self.model)
        if self.type == "Unigram":
            model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if i in ids]
            if model.get("unk_id") is not None:
                model["unk_id"] = new(model["unk_id"])
            return model
        vocab = {token: new(i) for token, i in self.model_vocab.items() if i in ids}
        model["vocab"] = vocab
        if self.type == "BPE":
            prefix = model.get("continuing_subword_prefix") or ""
            # Not only the canonical rules: any further rule between kept tokens stood in the
            # original too, and keeps the encoding of other text closer to it.
            model["merges"] = [
                merge
                for merge in model["merges"]
                for left, right in [split_rule(merge)]
                if left in vocab and right in vocab and result_of(left, right, prefix) in vocab
            ]
        return model


def _does_not_load(where: str, reason: str) -> LMHeadError:
    return BadCheckpoint(
        f"{where} does not load ({reason}); expected a file of the tokenizers library"
    )


def build(text: str, where: str) -> "Tokenizer":
    """Build a tokenizer from its JSON text, without truncation and padding."""
    from tokenizers import Tokenizer

    with refusing(partial(_does_not_load, where), quiet=True):
        refuse_charsmap(text.encode())
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _type_of(model: Mapping[str, Any]) -> str:
    """Return the type, which old files leave to be guessed from what is there."""
    if "type" in model:
        return str(model["type"])
    if "merges" in model:
        return "BPE"
    if isinstance(model["vocab"], list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _post_processors(processor: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the post-processors, those of a sequence one by one."""
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [p for inner in processor["processors"] for p in _post_processors(inner)]
    return [dict(processor) if not isinstance(processor, dict) else processor]


def _remap_post_processor(processor: dict[str, Any], new: Callable[[int], int]) -> None:
    if processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new(i) for i in token["ids"]]
    elif processor["type"] in ("BertProcessing", "RobertaProcessing"):
        for side in ("sep", "cls"):
            token, token_id = processor[side]
            processor[side] = [token, new(token_id)]


def _named_tokens(data: Mapping[str, Any]) -> set[str]:
    """Return the tokens that the file names outside its vocabulary."""
    named = set()
    if unk := data["model"].get("unk_token"):
        named.add(unk)
    for processor in _post_processors(data.get("post_processor")):
        if processor["type"] == "TemplateProcessing":
            for token in processor["special_tokens"].values():
                named.update(token["tokens"])
        elif processor["type"] in ("BertProcessing", "RobertaProcessing"):
            named.update((processor["sep"][0], processor["cls"][0]))
    if padding := data.get("padding"):
        named.add(padding["pad_token"])
    return named
