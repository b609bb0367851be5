"""The tokenizer that a GGUF file describes, built directly with the `tokenizers` library.

Two kinds exist in the architectures that lmhead converts:

- `gpt2`: byte-level BPE. The file lists the merges and names, under `tokenizer.ggml.pre`, the rule
  that cuts text into words before merging; the rules themselves are known by that name alone.
- `llama`: SentencePiece BPE. The file lists a score per token; merging the adjacent pair whose
  joint token scores highest is the same as applying pair merges in the order of those scores.

Control tokens (chat markers) and user-defined tokens are matched in the text before anything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, LMHeadError, UnsupportedModel
from lmhead.files import limits
from lmhead.files.gguf import GGUFArray, GGUFFile

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # how SentencePiece writes a space

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 and Qwen 2 differ only in how many digits may stand together.
_MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _WordRule:
    """How a byte-level BPE cuts text into words: each pattern splits what the one before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is itself a token stays whole, whatever the merges
    nfc: bool = False
    add_bos: bool = False  # where the file does not say


_LLAMA3 = _WordRule((_MODERN_WORDS % "{1,3}",), whole_words=True, add_bos=True)
_WORD_RULES: Mapping[str, _WordRule] = {
    "gpt-2": _WordRule((_GPT2_WORDS,)),
    "smollm": _WordRule((r"\p{N}", _GPT2_WORDS)),
    "default": _WordRule(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _WordRule((_MODERN_WORDS % "",), nfc=True),
}


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer and what its configuration has to say about it."""

    tokenizer: "Tokenizer"
    special: Mapping[str, int]  # bos, eos, eot, eom, unk, pad: those that the file names
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    def token(self, name: str) -> str | None:
        """Spell the special token of that name."""
        id_ = self.special.get(name)
        return None if id_ is None else self.tokenizer.id_to_token(id_)

    @property
    def end_ids(self) -> list[int]:
        """List the ids that end a generated text, the file's end-of-sequence first."""
        ids = [self.special[name] for name in ("eos", "eot", "eom") if name in self.special]
        return list(dict.fromkeys(ids))


def build_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer that the file's metadata describes."""
    try:
        return _build(file)
    except (LMHeadError, ImportError, OSError):
        raise
    except BaseException as error:  # the tokenizers library panics outside of Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise BadCheckpoint(
            f"{file.path} describes a tokenizer that cannot be built "
            f"({(str(error).splitlines() or [type(error).__name__])[0][:200]}); fetch it again"
        ) from error


def _build(file: GGUFFile) -> GGUFTokenizer:
    vocabulary = _Vocabulary.of(file)
    if vocabulary.kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    else:
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of the kind {vocabulary.kind!r}; expected gpt2 "
            "(byte-level BPE) or llama (SentencePiece BPE): take the original model folder instead"
        )
    tokenizer.add_tokens(_added_tokens(vocabulary))

    special = vocabulary.special
    add_bos = vocabulary.flag("add_bos_token", add_bos and "bos" in special)
    add_eos = vocabulary.flag("add_eos_token", False)
    for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
        if wanted and name not in special:
            raise BadCheckpoint(
                f"{file.path} asks for a {name} token around every text but names none; "
                "fetch it again or take the original model folder"
            )
    template = file.metadata.get("tokenizer.chat_template")
    result = GGUFTokenizer(
        tokenizer, special, add_bos, add_eos, template if isinstance(template, str) else None
    )
    _set_template(result)
    return result


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer's arrays, decoded and checked against each other."""

    file: GGUFFile
    kind: str
    tokens: Sequence[str]
    types: Sequence[int]
    special: Mapping[str, int]

    @classmethod
    def of(cls, file: GGUFFile) -> "_Vocabulary":
        kind = file.metadata.get("tokenizer.ggml.model")
        tokens = _array(file, "tokens", str)
        if kind is None or not tokens:
            raise UnsupportedModel(
                f"{file.path} holds no tokenizer; take a GGUF file of the whole model "
                "or the original model folder"
            )
        types = _array(file, "token_type", int) or [_NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise BadCheckpoint(
                f"{file.path} has {len(tokens):,} tokens but {len(types):,} token types; "
                "fetch it again"
            )
        longest = max(map(len, tokens))
        if longest > limits.TOKEN or sum(len(t) ** 2 for t in tokens) > limits.TOKEN_WORK:
            raise BadCheckpoint(
                f"{file.path} has a token of {longest:,} characters, or too many long ones; "
                f"expected at most {limits.TOKEN:,}: fetch it again"
            )
        special = _special_ids(file, str(kind), len(tokens))
        vocabulary = cls(file, str(kind), tokens, types, special)
        if len({vocabulary.spelled(id_) for id_ in range(len(tokens))}) != len(tokens):
            raise BadCheckpoint(f"{file.path} lists a token twice; fetch it again")
        return vocabulary

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.file.metadata.get(f"tokenizer.ggml.{key}", default))

    @property
    def space_prefix(self) -> bool:
        """Whether a space is put before every text; only SentencePiece does."""
        return self.kind == "llama" and self.flag("add_space_prefix", True)

    def spelled(self, id_: int) -> str:
        """Spell a token as its model does; GGUF writes user-defined ones with real spaces.

        Behind a space put in front they could only be found in the text as it was before, so there
        they stay as they are.
        """
        token = self.tokens[id_]
        if self.kind == "llama" and self.types[id_] == _USER_DEFINED and not self.space_prefix:
            return token.replace(" ", _SPACE)
        return token


def _array(file: GGUFFile, key: str, kind: type) -> Sequence[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}", ())
    if not isinstance(values, GGUFArray | tuple) or (values and not isinstance(values[0], kind)):
        raise BadCheckpoint(
            f"{file.path}: tokenizer.ggml.{key} is not an array of {kind.__name__}; fetch it again"
        )
    return values[:]


def _special_ids(file: GGUFFile, kind: str, count: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown"}
    keys["pad"] = "padding"
    # SentencePiece's own numbering, which files of that kind may leave unsaid.
    found = {"unk": 0, "bos": 1, "eos": 2} if kind == "llama" else {}
    for name, key in keys.items():
        id_ = file.metadata.get(f"tokenizer.ggml.{key}_token_id", found.get(name))
        if id_ is None or id_ == 0xFFFFFFFF:  # how some writers say "none"
            found.pop(name, None)
            continue
        if not isinstance(id_, int) or not 0 <= id_ < count:
            raise BadCheckpoint(
                f"{file.path}: the {name} token has the id {id_!r}, expected one of "
                f"0 to {count - 1:,}; fetch it again"
            )
        found[name] = id_
    return found


def _byte_level(vocabulary: _Vocabulary) -> "tuple[Tokenizer, bool]":
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    metadata = vocabulary.file.metadata
    rule_name = metadata.get("tokenizer.ggml.pre")
    if rule_name is None and metadata.get("general.architecture") == "gpt2":
        rule_name = "gpt-2"  # files older than the key, of the model that the rule is named after
    if not isinstance(rule_name, str) or rule_name not in _WORD_RULES:
        raise UnsupportedModel(
            f"{vocabulary.file.path} splits text into words by the rule {rule_name!r}; expected "
            "one "
            f"of {', '.join(_WORD_RULES)}: take the original model folder instead"
        )
    rule = _WORD_RULES[rule_name]

    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    merges: list[tuple[str, str]] = []
    for merge in _array(vocabulary.file, "merges", str):
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise BadCheckpoint(
                f"{vocabulary.file.path}: the merge {merge!r} names a token that is not in the "
                "vocabulary; fetch it again"
            )
        merges.append((left, right))

    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _words(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _words(rule: _WordRule) -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    steps: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = _array(vocabulary.file, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise BadCheckpoint(
            f"{vocabulary.file.path} has {len(vocabulary.tokens):,} tokens but {len(scores):,} "
            "scores; fetch it again"
        )
    ids = {vocabulary.spelled(id_): id_ for id_ in range(len(vocabulary.tokens))}
    unk = vocabulary.special.get("unk")
    tokenizer = Tokenizer(
        BPE(
            ids,
            _merges_by_score(vocabulary, scores),
            unk_token=None if unk is None else vocabulary.tokens[unk],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        )
    )
    prefix = vocabulary.space_prefix
    to_marks = normalizers.Replace(" ", _SPACE)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), to_marks]) if prefix else to_marks
    )
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """List every pair of tokens that joins to a token, the best-scoring result first.

    Only normal tokens merge: the others are matched in the text as they stand, or stand for bytes.
    """
    normal = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == _NORMAL
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(normal, key=normal.__getitem__, reverse=True):
        # The longest left part first: between ways to the same token the order is free.
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in normal and token[cut:] in normal:
                merges.append((left, token[cut:]))
    return merges


def _added_tokens(vocabulary: _Vocabulary) -> "list[AddedToken]":
    """Collect the tokens that are matched whole in the text, in the order of their ids."""
    from tokenizers import AddedToken

    named = set(vocabulary.special.values())
    added: list[AddedToken] = []
    for id_, kind in enumerate(vocabulary.types):
        special = kind in (_CONTROL, _UNKNOWN) or id_ in named
        if special or kind == _USER_DEFINED:
            text = vocabulary.spelled(id_)
            # A run of spaces must be looked for where spaces have become marks already.
            marked = kind == _USER_DEFINED and text != vocabulary.tokens[id_]
            added.append(AddedToken(text, special=special, normalized=marked))
    return added


def _set_template(built: GGUFTokenizer) -> None:
    """Put the beginning- and end-of-sequence tokens around every text, where the file asks."""
    from tokenizers.processors import TemplateProcessing

    if not (built.add_bos or built.add_eos):
        return
    before = [str(built.token("bos"))] if built.add_bos else []
    after = [str(built.token("eos"))] if built.add_eos else []
    single = [f"{piece}:0" for piece in (*before, "$A", *after)]
    second = [f"{piece}:1" for piece in (*before, "$B", *after)]
    names = sorted({*before, *after})
    if any(":" in name or name.startswith("$") for name in names):
        raise UnsupportedModel(
            f"the tokens around every text, {' and '.join(names)}, contain a character with a "
            "special meaning in templates of the tokenizers library (':' or '$'); use the original "
            "model folder"
        )
    built.tokenizer.post_processor = TemplateProcessing(
        single=single,
        pair=single + second,
        special_tokens=[(name, built.tokenizer.token_to_id(name)) for name in names],
    )
