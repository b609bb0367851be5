"""Guided decoding: the mask is exactly what the grammar allows, and its end is known."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmhead.errors import BadInput, MissingExtra
from lmhead.sampling import GuideState, NothingLeft, Sampler, SamplingParams, compile_guide

pytest.importorskip("llguidance", reason="needs the extra `guided`")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    """Byte-level, with some merges, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ('"', ":"), ("1", "2")]
    pieces = [*alphabet, *(left + right for left, right in merges), "<eos>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def write(sampler: Sampler, V: int, seed: int, most: int = 400) -> tuple[list[int], bool]:
    """Write with random logits until the grammar is complete or a stop id is drawn."""
    g = torch.Generator().manual_seed(seed)
    seq = sampler.start(seed=seed)
    while len(seq.output_ids) < most:
        sampler.step(torch.randn(1, V, generator=g) * 2, [seq])
        if seq.finished:
            return seq.output_ids, True
    return seq.output_ids, False


def valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 4
        and set(value["tags"]) <= {"a", "b", "c"}
        and isinstance(value["ok"], bool)
    )


def test_a_schema_holds_50_times_of_50_at_temperature_1_5(tiny):
    params = SamplingParams(json_schema=SCHEMA, temperature=1.5, stop_ids=[260])
    sampler = Sampler.from_params(params, tokenizer=tiny)
    V = tiny.get_vocab_size() + 11  # a padded head
    for seed in range(50):
        ids, finished = write(sampler, V, seed)
        assert finished
        assert valid(tiny.decode(ids))


def check_masks(guide: GuideState, backend: Tokenizer, words: list[str], pieces: list[str]) -> None:
    """Write pieces, and before each compare the mask with a search over the whole vocabulary."""
    V = backend.get_vocab_size()
    texts = backend.decode_batch([[i] for i in range(V)], skip_special_tokens=False)
    written = ""
    for piece in pieces:
        rests = [w[len(written) :] for w in words if w.startswith(written)]
        expected = [i for i, t in enumerate(texts) if t and any(r.startswith(t) for r in rests)]
        if len(rests) == 1:  # what must follow is forced, in the tokenizer's own way to write it
            expected = backend.encode(rests[0], add_special_tokens=False).ids[:1]
        assert guide.mask(V + 7).nonzero().squeeze(-1).tolist() == expected
        assert not guide.finished
        guide.accept(texts.index(piece))
        written += piece
    assert guide.finished
    assert guide.accepting


def test_the_mask_is_what_a_search_over_the_vocabulary_finds(tiny):
    words = ["abcab", "abd", "12"]
    for pieces in (["ab", "c", "ab"], ["a", "b", "d"], ["12"], ["1", "2"]):
        guide = compile_guide(tiny, regex="|".join(words), stop_ids=[260]).start()
        check_masks(guide, tiny, words, pieces)


def test_a_grammar_that_may_end_or_go_on_allows_the_stop_id(tiny):
    sampler = Sampler.from_params(SamplingParams(regex="ab+", stop_ids=[260]), tokenizer=tiny)
    seq = sampler.start()
    for piece in ("a", "b"):
        seq.accept(tiny.token_to_id(piece))
    p = sampler.probs(torch.zeros(1, 270), [seq])[0]
    assert p.nonzero().squeeze(-1).tolist() == [tiny.token_to_id("b"), 260]
    assert not seq.finished
    seq.accept(260)
    assert seq.finished
    seq.accept(260)  # a finished row kept in a batch does no harm
    assert seq.finished


def test_a_lark_grammar(tiny):
    params = SamplingParams(grammar='start: "(" start ")" | "x"', stop_ids=[260])
    sampler = Sampler.from_params(params, "llama.cpp", tokenizer=tiny)
    texts = {tiny.decode(write(sampler, 261, seed)[0]) for seed in range(20)}
    assert len(texts) > 1
    assert all(t.strip("()") == "x" and t.count("(") == t.count(")") for t in texts)


def test_each_sequence_has_its_own_place_in_the_grammar(tiny):
    params = SamplingParams(json_schema=SCHEMA, stop_ids=[260], top_k=20)
    sampler = Sampler.from_params(params, "vllm", tokenizer=tiny)
    z = torch.randn(60, 3, 261, generator=torch.Generator().manual_seed(0))
    batch = [sampler.start(seed=s) for s in range(3)]
    alone = sampler.start(seed=1)
    for step in z:
        sampler.step(step, batch)
        sampler.step(step[1:2], [alone])
    assert alone.output_ids == batch[1].output_ids
    assert batch[0].output_ids != batch[1].output_ids


def test_a_grammar_and_a_ban_that_exclude_each_other_name_both(tiny):
    params = SamplingParams(regex="a", banned_ids=[tiny.token_to_id("a")], stop_ids=[260])
    sampler = Sampler.from_params(params, tokenizer=tiny)
    with pytest.raises(NothingLeft, match="banned_ids 260, guided 0"):
        sampler.probs(torch.zeros(1, 261))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regex": "a(("}, "the regex cannot be used: .*unclosed group"),
        ({"json_schema": "{x"}, "json_schema is .*not JSON"),
        ({"json_schema": {"type": "foo"}}, "the json_schema cannot be used: .*foo"),
        ({"grammar": "start: foo"}, "the grammar cannot be used: .*foo"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_an_error_of_one_line(tiny, values, message):
    with pytest.raises(BadInput, match=message) as error:
        Sampler.from_params(SamplingParams(**values), tokenizer=tiny)
    assert "\n" not in str(error.value)


DEEP = """
import itertools, json, string, sys
from lmhead.errors import BadInput
from lmhead.files.limits import GRAMMAR
from lmhead.sampling import compile_guide
from lmhead.sampling.guided import check_guide

letters = string.ascii_lowercase
names = ["".join(p) for n in (1, 2, 3) for p in itertools.product(letters, repeat=n)]
names = [name for name in names if name != "start"]

def chain(line, end, most):
    # as many rules, each naming the next, as the limit lets through
    lines, used = [], len(end) + 40
    for this, after in zip(names, names[1:]):
        made = line.format(this, after)
        used += len(made) + 1
        if used > most or len(lines) > len(names) - 3:
            break
        lines.append(made)
    return lines, end.format(names[len(lines)])

rules, last = chain("{}:{}", '{}:"x"', GRAMMAR)
terms, final = chain("{}:{}", '{}:"x"', GRAMMAR)
given = {
    "rules": {"grammar": "\\n".join(["start:a", *rules, last])},
    "terminals": {"grammar": "\\n".join(["start:A", *(t.upper() for t in terms),
                                         final.split(":")[0].upper() + ':"x"'])},
}
count = 3000
of = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)}
refs = {"$ref": "#/$defs/a0", "$defs": {**of, f"a{count}": {"type": "string"}}}
given["refs"] = {"json_schema": refs}
for name, one in given.items():
    assert len(json.dumps(one)) > 0.5 * GRAMMAR, name
    try:
        check_guide(**one)
        state = compile_guide(sys.argv[1], **one).start()
        state.mask(300)
        print(name, "compiled")
    except BadInput as error:
        print(name, error)
"""


def test_a_grammar_as_deep_as_may_be_does_not_end_the_process(tiny, tmp_path: Path):
    """llguidance recurses; at 8 MB of stack some 1,500 rules that name each other ended it."""
    tiny.save(str(tmp_path / "tokenizer.json"))
    done = subprocess.run(
        [sys.executable, "-c", DEEP, str(tmp_path / "tokenizer.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])
    assert len(done.stdout.splitlines()) == 3


SHORT = """
import resource
import llguidance
from lmhead.errors import LMHeadError
from lmhead.sampling.guided import check_guide

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + MORE * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    for _ in range(300):
        check_guide(regex="a+")
    print("checked")
except LMHeadError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux says of memory")
@pytest.mark.parametrize(("more", "expected"), [(700, "checked"), (200, "512 MB of stack")])
def test_a_process_short_of_memory_waits_for_a_stack_or_says_so(more: int, expected: str):
    """With room for one stack of 512 MB but not for two, a thread waits for the last one's."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT.replace("MORE", str(more))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert expected in done.stdout


def test_a_token_that_the_grammar_does_not_allow_is_an_error(tiny):
    guide = compile_guide(tiny, regex="ab").start()
    with pytest.raises(BadInput, match="the grammar cannot continue"):
        guide.accept(tiny.token_to_id("z"))


def test_a_guide_needs_a_tokenizer():
    with pytest.raises(BadInput, match="give tokenizer="):
        Sampler.from_params(SamplingParams(regex="a"))
    with pytest.raises(BadInput, match=r"nowhere/tokenizer\.json is not a tokenizer\.json"):
        compile_guide("nowhere/tokenizer.json", regex="a")
    with pytest.raises(BadInput, match="SimpleNamespace is not a fast tokenizer"):
        compile_guide(SimpleNamespace(), regex="a")


def test_without_the_extra_the_error_says_how_to_install_it(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[guided\]'"):
        Sampler.from_params(SamplingParams(regex="a"), tokenizer=tiny)


@pytest.fixture(scope="module")
def real(smollm2):
    """The tokenizer of smollm2-135m."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.model
def test_a_real_tokenizer_is_masked_exactly(real, smollm2):
    words = ["yes", "no", "maybe later", "may I"]
    for source in (real, smollm2 / "tokenizer.json"):
        guide = compile_guide(source, regex="|".join(words)).start()
        check_masks(guide, real.backend_tokenizer, words, ["may", "be", " later"])


@pytest.mark.model
def test_a_schema_holds_with_a_real_vocabulary(real):
    params = SamplingParams(json_schema=SCHEMA, temperature=1.5, top_p=0.95)
    sampler = Sampler.from_params(params, vocab_size=len(real), tokenizer=real)
    for seed in range(20):
        ids, finished = write(sampler, 49_152, seed)
        assert finished
        assert valid(real.decode(ids, skip_special_tokens=True))
