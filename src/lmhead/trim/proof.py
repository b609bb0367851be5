"""The parts of a proof that need no model run: tokens, bytes and ids.

Each check compares a trimmed model with its original and says how much it looked at, how much of
that failed, and where first.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.errors import BadInput
from lmhead.files.safetensors import TensorHeader
from lmhead.progress import Progress, silent
from lmhead.trim.checkpoint import row_pieces
from lmhead.trim.corpus import Corpus, batches
from lmhead.trim.folder import ModelFolder, names_ids, remap_ids, render_conversations
from lmhead.trim.idmap import TrimMap

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Text of many kinds; most of it is foreign to most corpora.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg.",
    "Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ταχίστη αλώπηξ βαφής ψημένη γη, δρασκελίζει υπέρ νωθρού κυνός.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "色は匂へど散りぬるを我が世誰ぞ常ならむ",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 ½ № ™ ∑∫√ ← ⟨ψ|φ⟩",
    "def f(x: int) -> int:\n\treturn x ** 2  # 3.14e-10, 0xFF\r\n\n\n    pass",
    "a" * 40 + " " * 17 + "!?" * 9,
    "e\u0301 \u200b\u00a0\ufeff\u2028 zero-width and odd spaces",
    "\x01\x02 \x7f control",
)


@dataclass(frozen=True)
class Check:
    """One comparison: how much was looked at, how much of it failed, and where first."""

    name: str
    tested: int
    failed: int
    note: str = ""
    binding: bool = True  # whether a failure means that the trim is wrong

    @property
    def passed(self) -> bool:
        """Whether nothing failed that should not."""
        return self.failed == 0 or not self.binding

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self), "passed": self.passed}


def id_map(
    original: ModelFolder, trimmed: ModelFolder, report: Mapping[str, Any] | None = None
) -> tuple[TrimMap, Check]:
    """Find by the tokens themselves which id became which; check the order, and what a report says.

    `report` is the lmhead_trim.json of the trimmed model: its id map is what others go by.
    """
    old = original.tokenizer.vocab
    lost = [token for token in trimmed.tokenizer.vocab if token not in old]
    kept = sorted(old[token] for token in trimmed.tokenizer.vocab if token in old)
    made_from = "" if report is None else f" (it was made from {report.get('model')!s:.80})"
    if sum(i < original.rows for i in kept) < 2:
        raise BadInput(
            f"{trimmed.folder} shares almost no token with {original.folder}{made_from}; expected "
            "the original model first, then the one that was trimmed from it"
        )
    ids = TrimMap(tuple(kept), original.rows)
    wrong = [
        token
        for token, new in trimmed.tokenizer.vocab.items()
        if token in old and ids.to_trimmed([old[token]]) != [new]
    ]
    rows = int(ids.kept_rows != trimmed.rows)
    said = None if report is None else _wrong_in(report, ids)
    note = f"{len(ids):,} of {len(old):,} tokens, {trimmed.rows:,} of {original.rows:,} rows kept"
    if lost or wrong:
        token = (lost or wrong)[0]
        note = f"the token {token!r} has no or another place in the original{made_from}"
    elif rows:
        note = f"the trimmed head has {trimmed.rows:,} rows for {ids.kept_rows:,} tokens"
    elif said:
        note = said
    failed = len(lost) + len(wrong) + rows + int(said is not None)
    return ids, Check("id map", len(trimmed.tokenizer.vocab), failed, note)


def _wrong_in(report: Mapping[str, Any], ids: TrimMap) -> str | None:
    """Say what a report tells wrongly of the ids, None if nothing."""
    try:
        recorded = TrimMap.from_dict(report.get("id_map") or {})
    except BadInput as error:
        return f"lmhead_trim.json: {error}"
    if recorded != ids:
        differing = sorted(set(recorded.kept) ^ set(ids.kept))
        where = f"at the id {differing[0]}" if differing else "in the number of rows"
        return f"the id map of lmhead_trim.json is not that of the tokenizer: they differ {where}"
    counts = {"rows": ids.rows, "kept_rows": ids.kept_rows, "kept_tokens": len(ids)}
    for name, number in counts.items():
        if report.get(name, number) != number:
            return f"lmhead_trim.json says {name} {report[name]!s:.20}, but it is {number:,}"
    return None


def check_corpus(
    original: "Sequence[Tokenizer]",
    trimmed: "Sequence[Tokenizer]",
    ids: TrimMap,
    corpus: Corpus,
    progress: Progress = silent,
) -> Check:
    """Encode every text with both; those whose tokens are all kept must have the same tokens.

    A text that holds a dropped token (below min-count, or beyond size) cannot keep its tokens; it
    must still decode as before.
    """
    kept = set(ids.kept)
    texts = changed = with_dropped = tokens = 0
    first = ""
    with progress("comparing the tokens of every text", total=corpus.characters) as advance:
        for batch in batches(corpus):
            words = [text.text for text in batch]
            for before, after in zip(original, trimmed, strict=True):
                pairs = zip(
                    batch,
                    before.encode_batch_fast(words),
                    after.encode_batch_fast(words),
                    strict=True,
                )
                for text, a, b in pairs:
                    old, new = a.ids, b.ids
                    tokens += len(old)
                    texts += 1
                    if not kept.issuperset(old):
                        with_dropped += 1
                        same = before.decode(old) == after.decode(new)
                    else:
                        same = ids.to_original(new) == old
                    if not same:
                        changed += 1
                        first = first or f"the first is {text.where}"
            advance(sum(map(len, words)))
    note = first or f"{tokens:,} tokens"
    if with_dropped:
        note += f"; {with_dropped:,} texts hold dropped tokens and are spelled with others"
    return Check("corpus texts with other tokens", texts, changed, note)


def check_other_text(
    original: "Sequence[Tokenizer]", trimmed: "Sequence[Tokenizer]", seed: int = 0
) -> Check:
    """Encode and decode text of every kind: the trimmed tokenizer must lose nothing more."""
    texts = [*PROBES, *_random_texts(random.Random(seed), 200)]
    lost, before_tokens, after_tokens = [], 0, 0
    for before, after in zip(original, trimmed, strict=True):
        for text in texts:
            old, new = before.encode(text).ids, after.encode(text).ids
            before_tokens += len(old)
            after_tokens += len(new)
            if after.decode(new) != before.decode(old):
                lost.append(text)
    ratio = after_tokens / max(1, before_tokens)
    note = f"x{ratio:.3f} tokens" if not lost else f"the first is {lost[0]!r}"
    return Check("other texts that decode worse", len(texts) * len(original), len(lost), note)


def _random_texts(rng: random.Random, count: int) -> Iterator[str]:
    planes = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x900, 0xE80), (0x3040, 0xA000),
              (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF), (0x0, 0xD800))  # fmt: skip
    for _ in range(count):
        yield "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randint(1, 40)))


def check_weights(
    old: Mapping[str, TensorHeader],
    new: Mapping[str, TensorHeader],
    ids: TrimMap,
    progress: Progress = silent,
) -> Check:
    """Compare every weight byte by byte: the kept rows, and all tensors without rows."""
    failed = sorted(set(old) ^ set(new))
    total = sum(header.nbytes for header in new.values())
    with progress("comparing the weights", total=total) as advance:
        for name in sorted(set(old) & set(new)):
            a, b = old[name], new[name]
            # A shard without rows may be the same file, linked.
            if not (a.file.samefile(b.file) or _same(a, b, ids)):
                failed.append(name)
            advance(b.nbytes)
    note = f"the first is {failed[0]}" if failed else f"{total:,} bytes"
    if len(failed) >= len(new):
        note = "all of them: is the original the model that this one was trimmed from?"
    return Check("weights that differ", len(new), len(failed), note)


def _same(a: TensorHeader, b: TensorHeader, ids: TrimMap) -> bool:
    if a.dtype != b.dtype:
        return False
    kept, rows = None, 1
    if a.shape != b.shape:
        if a.shape[0] != ids.rows or b.shape != (ids.kept_rows, *a.shape[1:]):
            return False
        kept, rows = ids.row_ids, ids.rows
    compared = 0
    with a.file.open("rb") as old, b.file.open("rb") as new:
        new.seek(b.offset)
        for piece in row_pieces(old, a.offset, a.nbytes, rows, kept):
            found = np.frombuffer(new.read(piece.nbytes), np.uint8)
            if not np.array_equal(piece.reshape(-1), found):
                return False
            compared += piece.nbytes
    return compared == b.nbytes


def check_ids(original: ModelFolder, trimmed: ModelFolder, ids: TrimMap) -> Check:
    """Compare every id that a configuration names, the special tokens and the chat template."""
    wrong: list[str] = []
    tested = 0
    configs = (
        ("config.json", original.checkpoint.config, trimmed.checkpoint.config),
        (
            "generation_config.json",
            original.checkpoint.generation_config,
            trimmed.checkpoint.generation_config,
        ),
    )
    for name, old, new in configs:
        expected, found = _named_ids(old), _named_ids(new)
        tested += len(expected)
        known = [i for i in expected if i in ids]
        if ids.to_trimmed(known) != [i for i in found if 0 <= i < len(ids)][: len(known)]:
            wrong.append(name)
        elif _settings(old) != _settings(new):
            wrong.append(f"settings of {name}")
    before, after = original.hf_tokenizer, trimmed.hf_tokenizer
    tested += len(before.all_special_tokens)
    if before.all_special_tokens != after.all_special_tokens:
        wrong.append("special tokens")
    elif [i for i in before.all_special_ids if i in ids] != ids.to_original(
        i for i in after.all_special_ids if i is not None and i < len(ids)
    ):
        wrong.append("ids of special tokens")
    if before.chat_template != after.chat_template:
        wrong.append("chat template")
    elif before.chat_template:
        for text in render_conversations(before):
            tested += 1
            old_ids = before(text, add_special_tokens=False)["input_ids"]
            new_ids = after(text, add_special_tokens=False)["input_ids"]
            if ids.to_original(new_ids) != list(old_ids):
                wrong.append(f"the tokens of the conversation {text[:40]!r}")
                break
    note = f"wrong: {', '.join(wrong)}" if wrong else "configurations, special tokens, template"
    return Check("ids that do not agree", tested, len(wrong), note)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without ids, sizes of the vocabulary, and where it came from."""
    about = ("vocab_size", "_name_or_path", "transformers_version")
    return {
        key: _settings(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in about and not names_ids(key)
    }


def _named_ids(config: Any) -> list[int]:
    found: list[int] = []

    def note(i: int) -> int:
        found.append(i)
        return i

    remap_ids(config, note)
    return found
