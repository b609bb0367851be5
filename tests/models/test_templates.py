"""Chat templates end in time, whatever they do."""

import sys
import threading
import time

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lmhead.errors import BadCheckpoint, BadInput
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
    with pytest.raises(BadInput, match=r"\(no\)"):
        render(tokenizer("{{ raise_exception('no') }}"), HI, "tiny")
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    "source", ["{{ 1 // 0 }}", "{{ 1 + 'a' }}", "{{ x.y.z }}", "{% for %}", "{{ messages | nope }}"]
)
def test_whatever_a_template_raises_is_ours(source: str) -> None:
    with pytest.raises(BadInput, match="rejects this conversation"):
        render(tokenizer(source), HI, "tiny")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 9 ** 9 ** 9 }}", "power"),
        ("{{ 'x' * 10000000000 }}", "takes more than"),
        (
            "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}"
            "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
            "takes more than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by what /proc tells")
def test_a_template_that_takes_all_there_is_is_stopped(
    source: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    alone = [t for t in threading.enumerate() if not t.daemon]
    if len(alone) > 1:
        pytest.skip(f"other threads run here ({alone}), so that memory is not limited")
    monkeypatch.setattr(templates, "BYTES", 2**28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(BadCheckpoint, match=why):
        render(tokenizer(source), HI, "tiny")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_arguments_may_be_passed_on() -> None:
    source = "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(**{'a': 'so'}) }}"
    assert render(tokenizer(source), HI, "tiny") == "so"
