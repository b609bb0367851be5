"""Chat templates end in time, whatever they do."""

import sys
import time

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lmhead.errors import BadCheckpoint
from lmhead.models import templates
from lmhead.models.templates import render

HI = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    found.chat_template = template
    return found


LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% for a in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
    "{% set a = range(99999) | list %}{% for i in a %}{% if i in a and 'x' in a %}{% endif %}"
    "{% endfor %}",
)


@pytest.mark.parametrize("loops", LOOPS)
def test_a_template_that_never_ends_is_stopped(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(BadCheckpoint, match="the chat template of tiny"):
        render(tokenizer(loops + PLAIN), HI, "tiny")
    assert time.monotonic() - start < 5


def test_a_template_of_a_model_is_what_transformers_renders() -> None:
    found = tokenizer(PLAIN)
    before = sys.gettrace()
    assert render(found, HI, "tiny") == found.apply_chat_template(HI, tokenize=False)
    assert render(found, HI, "tiny", chat_template="{{ messages[0].content }}!") == "Hi!"
    with pytest.raises(TemplateError):
        render(tokenizer("{{ raise_exception('no') }}"), HI, "tiny")
    assert sys.gettrace() is before
