"""Texts and tokenizers for trimming, all made on the spot."""

import ast
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

OTHER_TEXT = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "いろはにほへと ちりぬるを",
    "x = {**a, 'ключ': [1, 2.5e-3]}  # \t\n\n\n",
    "🙂🙃 naïve café — “quotes” … №5",
    "",
    " ",
    "\x00\x07",
)


@cache
def _docstrings() -> tuple[str, ...]:
    texts = []
    for file in sorted(Path(os.__file__).parent.glob("[a-m]*.py"))[:60]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and (text := ast.get_docstring(node)):
                texts.append(text)
    return tuple(texts)


@pytest.fixture(scope="session")
def docstrings() -> tuple[str, ...]:
    """Docstrings of the standard library: English, technical, of every length."""
    return _docstrings()


@pytest.fixture(scope="session")
def other_text() -> tuple[str, ...]:
    """Text unlike the docstrings."""
    return OTHER_TEXT


SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def byte_level() -> str:
    """A byte-level BPE with a chat marker outside the model's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_docstrings(), *OTHER_TEXT * 5], trainer)
    tokenizer.add_special_tokens(["<|chat|>"])
    tokenizer.add_tokens([AddedToken("lmhead", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer.to_str()


@cache
def sentencepiece_bpe() -> str:
    """A Llama-2 style BPE: byte fallback, and every rule that yields a token, by its score."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=SPECIAL + [f"<0x{b:02X}>" for b in range(256)],
        max_token_length=12,
        show_progress=False,
    )
    lines = (line[i : i + 60] for t in _docstrings() for line in [t] for i in range(0, len(t), 60))
    tokenizer.train_from_iterator(lines, trainer)
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    rules = []
    for token, score in vocab.items():
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(vocab[a], vocab[b], [a, b]) for a, b in splits if a in vocab and b in vocab]
        rules += [(score, *pair) for pair in sorted(pairs)]
    data["model"]["merges"] = [rule for *_, rule in sorted(rules)]
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in SPECIAL]
    data["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    rebuilt = Tokenizer.from_str(json.dumps(data))
    rebuilt.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return rebuilt.to_str()


@cache
def unigram() -> str:
    """A Unigram model without byte fallback, whose `[min]` piece is as unlikely as any."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=2500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*_docstrings(), *OTHER_TEXT], trainer)
    return tokenizer.to_str()


@cache
def wordpiece() -> str:
    """A lower-casing WordPiece model, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=3000,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_docstrings(), *OTHER_TEXT], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer.to_str()


@cache
def word_end_bpe() -> str:
    """A character BPE with an end-of-word suffix, as the first GPT has it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_docstrings(), *OTHER_TEXT], trainer)
    return tokenizer.to_str()


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (byte_level, sentencepiece_bpe, unigram, wordpiece, word_end_bpe)
}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], dict[str, Any]]:
    """A tokenizer.json by the name of its kind, as a parsed object of one's own."""
    return lambda kind: json.loads(MAKERS[kind]())


CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|chat|>system\nYou are a quizzical xylophone.\n{% endif %}"
    "<|chat|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|chat|>assistant\n{% endif %}"
)
MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write a tiny random model with a trained tokenizer; the same call gives the same folder."""

    @cache
    def make(
        kind: str = "byte_level", arch: str = "llama", tied: bool = True, shards: int = 1
    ) -> Path:
        import torch
        from transformers import (
            BertConfig,
            BertLMHeadModel,
            GPT2Config,
            GPT2LMHeadModel,
            GPTJConfig,
            GPTJForCausalLM,
            LlamaConfig,
            LlamaForCausalLM,
            PreTrainedTokenizerFast,
        )

        folder = tmp_path_factory.mktemp("model") / f"{kind}-{arch}"
        data = json.loads(MAKERS[kind]())
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(data)),
            eos_token={"byte_level": "<|endoftext|>", "wordpiece": "[SEP]"}.get(kind, "</s>"),
        )
        if kind == "byte_level":
            tokenizer.chat_template = CHAT
        end = tokenizer.eos_token_id
        V = len(tokenizer) + 3  # rows that no token belongs to, as many models have
        common = {"vocab_size": V, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
        small: dict[str, Any] = {
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        torch.manual_seed(0)
        model: Any
        if arch == "llama":
            model = LlamaForCausalLM(LlamaConfig(**common, **small, tie_word_embeddings=tied))
        elif arch == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(**common, n_embd=48, n_layer=2, n_head=4))
        elif arch == "gptj":
            config = GPTJConfig(**common, n_embd=48, n_layer=2, n_head=4, rotary_dim=4)
            config.tie_word_embeddings = False
            model = GPTJForCausalLM(config)
            torch.nn.init.normal_(model.lm_head.bias)
        else:
            model = BertLMHeadModel(BertConfig(**common, **small, is_decoder=True))
            torch.nn.init.normal_(model.cls.predictions.bias)
        for parameter in model.parameters():
            if parameter.shape[:1] == (V,) and parameter.ndim == 2:
                torch.nn.init.normal_(parameter)  # logits far enough apart to have a best one
        nbytes = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=nbytes if shards == 1 else nbytes // shards)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def corpus_file(docstrings: tuple[str, ...], tmp_path: Path) -> Path:
    """A .jsonl corpus of 60 docstrings."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in docstrings[:60]), "utf-8")
    return path
