from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmhead.loading import Model, load


@pytest.fixture(scope="session")
def words(tiny: Callable[..., Any]) -> Model:
    """A tiny random GPT-2 with a tokenizer of 99 words."""
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="w2")
    return load(tiny("gpt2", n_positions=512), tokenizer=tokenizer)
