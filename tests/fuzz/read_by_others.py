"""Readers that stand on other libraries: transformers, tokenizers, jinja, llguidance, gzip."""

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Reader = Callable[[bytes, Path], None]
Seeds = Callable[[], list[Any]]


@cache
def model_files() -> dict[str, bytes]:
    """A whole tiny Llama with its tokenizer, as transformers writes it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity(50)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"ab": 256, "<s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, num_attention_heads=2, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _with(folder: Path, name: str, data: bytes) -> None:
    for other, content in model_files().items():
        (folder / other).write_bytes(content)
    (folder / name).write_bytes(data)


def load_with(name: str) -> Reader:
    def read(data: bytes, folder: Path) -> None:
        from lmhead.loading import load

        _with(folder, name, data)
        model = load(folder)
        model.encode("ab, a prompt")
        model.encode("ab", chat=model.has_chat_template)

    return read


def read_head(data: bytes, folder: Path) -> None:
    from lmhead.head import LMHead

    _with(folder, "config.json", data)
    LMHead.from_pretrained(folder)


def required_ids(data: bytes, folder: Path) -> None:
    from lmhead.trim.folder import ModelFolder

    _with(folder, "tokenizer.json", data)
    ModelFolder.open(folder).required_ids()


def seed_of(name: str) -> Seeds:
    return lambda: [json.loads(model_files()[name])]


def saved_head() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        _saved(Path(folder))
        return [json.loads((Path(folder) / "saved" / "head.json").read_text())]


def _saved(folder: Path) -> Path:
    from lmhead.head import LMHead

    for name, content in model_files().items():
        (folder / name).write_bytes(content)
    LMHead.from_pretrained(folder).save_pretrained(folder / "saved")
    return folder / "saved"


@cache
def _saved_tensors() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return next(_saved(Path(folder)).glob("*.safetensors")).read_bytes()


def read_saved(data: bytes, folder: Path) -> None:
    from lmhead.head import LMHead
    from lmhead.head.saved import TENSORS

    (folder / TENSORS).write_bytes(_saved_tensors())
    (folder / "head.json").write_bytes(data)
    LMHead.from_pretrained(folder)


TEMPLATES = [
    b"{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    b"{% set ns = namespace(x='ab') %}{% for i in range(9) %}{% set ns.x = ns.x ~ ns.x %}"
    b"{% endfor %}{{ ns.x | length }}{{ messages[0]['content'] | upper }}",
    b"{% macro f(x) %}{% if x > 0 %}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(9) }}",
]
_PIECES = [
    b"{% for i in range(99999) %}",
    b"{% endfor %}",
    b"{{ 9 ** 9 ** 9 }}",
    b"{{ 'x' * 10000000000 }}",
    b"{{ messages * 1000000000 }}",
    b"{% set ns.x = ns.x ~ ns.x %}",
    b"{{ 1 // 0 }}",
    b"{{ ().__class__ }}",
    b"{{ raise_exception('no') }}",
    b"{% include 'x' %}",
    b"{{ '%9999999999d' % 1 }}",
    b"| tojson",
    b"(" * 300,
]


def mutated_template(random_: random.Random, seed: bytes) -> bytes:
    """Put pieces of trouble into a template, cut it, or repeat a part of it."""
    text = bytearray(seed)
    for _ in range(random_.choice((1, 1, 2, 3))):
        at = random_.randrange(len(text) + 1)
        kind = random_.random()
        if kind < 0.6:
            text[at:at] = random_.choice(_PIECES)
        elif kind < 0.8:
            del text[at : at + random_.choice((1, 2, 9))]
        else:
            text[at:at] = text[at : at + 40] * random_.choice((1, 3))
    return bytes(text)


@cache
def _tokenizer() -> Any:
    from lmhead.models.reading import read_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        _with(Path(folder), "config.json", model_files()["config.json"])
        return read_tokenizer(Path(folder))


def render_template(data: bytes, folder: Path) -> None:
    from lmhead.models import templates
    from lmhead.models.conversation import wrapped

    templates.SECONDS, templates.BYTES = 0.5, 200 * 2**20  # the harness allows 2 s and 300 MB
    tokenizer = _tokenizer()
    tokenizer.chat_template = data.decode("utf-8", "replace")
    wrapped(tokenizer, [{"role": "user", "content": "Hi"}], "tiny")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"a": {"anyOf": [{"enum": [1, "x", None]}, {"type": "array", "minItems": 1}]}},
}


def read_schema(data: bytes, folder: Path) -> None:
    from lmhead.sampling.guided import check_guide

    check_guide(json_schema=data.decode("utf-8", "replace"))


def screen_seed() -> list[Any]:
    import torch

    from lmhead.head.screening.bounds import build_screen
    from lmhead.head.screening.file import save_screen

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lmhead.screen"
        save_screen(build_screen(torch.randn(70, 16), 70), path, "0" * 64)
        return [path.read_bytes()]


def read_screen(data: bytes, folder: Path) -> None:
    from lmhead.head.screening.file import _about, load_screen

    (folder / "lmhead.screen").write_bytes(data)
    _about(folder / "lmhead.screen")
    load_screen(folder / "lmhead.screen", "0" * 64)


def corpus_seeds() -> list[Any]:
    lines = b'{"text": "one"}\n"two"\n{"text": "three", "n": 3}\n'
    return [b"p" + b"plain text\nof two lines\n", b"j" + lines, b"g" + gzip.compress(lines * 40)]


def read_corpus(data: bytes, folder: Path) -> None:
    from lmhead.trim.corpus import Corpus

    name = {b"j": "c.jsonl", b"g": "c.jsonl.gz"}.get(data[:1], "c.txt")
    (folder / name).write_bytes(data[1:])
    for text in Corpus((folder / name,), errors="skip"):
        text.text.encode()
    for text in Corpus((folder / name,)):
        text.text.encode()


def rows_seeds() -> list[Any]:
    return [{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "id": 7}]


def read_rows(data: bytes, folder: Path) -> None:
    from lmhead.cli.rows import rows_of

    (folder / "p.jsonl").write_bytes(data.replace(b"\n", b" ") + b"\n")
    for row in rows_of(folder / "p.jsonl", "prompt"):
        row.prompt()


def read_statements(data: bytes, folder: Path) -> None:
    from lmhead.steer.learn.reading import read_data

    (folder / "d.jsonl").write_bytes(data)
    read_data(folder / "d.jsonl")
    (folder / "d.csv").write_bytes(b"statement,group\n" + data)
    read_data(folder / "d.csv")


def statement_seeds() -> list[Any]:
    return [{"statement": "It is so", "label": 1}, {"prompt": "A", "true": " b", "false": " c"}]


def targets() -> dict[str, tuple[bool, Seeds, Reader]]:
    """Return name -> (whether it is JSON, what makes the seeds, what reads a file)."""
    return {
        "head-config": (True, seed_of("config.json"), read_head),
        "load-config": (True, seed_of("config.json"), load_with("config.json")),
        "load-generation": (True, lambda: [{"eos_token_id": 257}], load_with(GENERATION)),
        "load-tokenizer": (True, seed_of("tokenizer.json"), load_with("tokenizer.json")),
        "load-tokenizer-config": (True, seed_of(SETTINGS), load_with(SETTINGS)),
        "trim-folder": (True, seed_of("tokenizer.json"), required_ids),
        "saved-head": (True, saved_head, read_saved),
        "template": (False, lambda: list(TEMPLATES), render_template),
        "schema": (True, lambda: [SCHEMA], read_schema),
        "screen": (False, screen_seed, read_screen),
        "corpus": (False, corpus_seeds, read_corpus),
        "prompts": (True, rows_seeds, read_rows),
        "statements": (True, statement_seeds, read_statements),
    }


GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
