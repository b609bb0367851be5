"""DRY, its sequence breakers, and the history a sequence keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmhead.errors import BadInput
from lmhead.sampling import Candidates, Sampler, SamplingParams
from lmhead.sampling.breakers import breakers_of
from lmhead.sampling.penalties import dry, repeats
from lmhead.sampling.state import SequenceState, generator_for


def naive_repeats(history, allowed_length, breakers):
    """For each token and each of its places, walk back as long as the tokens are the same."""
    limit = len(history)
    for end in range(len(history), 0, -1):  # the last complete breaker ends before `end`
        starts = [
            s
            for s in range(end)
            for tail in breakers.get(history[s], ())
            if s + 1 + len(tail) == end and tuple(history[s + 1 : end]) == tail
        ]
        if starts:
            limit = len(history) - end
            break
    found = {}
    for j in range(1, len(history)):
        n = 0
        while n < j and n < limit and history[j - 1 - n] == history[len(history) - 1 - n]:
            n += 1
        token = history[j]
        if n >= allowed_length and () not in breakers.get(token, ()):
            found[token] = max(n, found.get(token, 0))
    return found


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    history=st.lists(st.integers(0, 4), max_size=40),
    allowed_length=st.integers(1, 4),
    breakers=st.sampled_from([{}, {4: ((),)}, {3: ((4,),)}, {2: ((), (1,))}]),
)
def test_repeats_are_those_of_a_naive_search(history, allowed_length, breakers):
    assert repeats(history, allowed_length, breakers) == naive_repeats(
        history, allowed_length, breakers
    )


def test_dry_example():
    # a b c c b c y a b c: c would extend "a b c", b would extend "c", y would extend "b c"
    a, b, c, y = range(4)
    history = [a, b, c, c, b, c, y, a, b, c]
    assert repeats(history, 1, {}) == {c: 3, b: 1, y: 2}
    seq = SequenceState(history, generator_for(0))
    settings_ = {"multiplier": 0.8, "base": 2.0, "allowed_length": 2, "last_n": -1}
    z = dry(Candidates.dense(torch.zeros(1, 5)), [seq], **settings_, breakers={}).z
    torch.testing.assert_close(z, torch.tensor([[0.0, 0.0, -1.6, -0.8, 0.0]]))


def test_dry_stays_finite_on_a_long_repeat():
    seq = SequenceState([1] * 5000, generator_for(0))
    c = Candidates.dense(torch.zeros(1, 3))
    for multiplier, base in ((0.8, 1.75), (5.0, 1.0), (1e35, 4.0)):
        z = dry(
            c, [seq], multiplier=multiplier, base=base, allowed_length=2, last_n=-1, breakers={}
        ).z
        assert z.isfinite().all()
        assert z[0, 1] < -4
        assert z[0, 0] == 0


def test_dry_looks_back_no_further_than_asked():
    assert repeats([1, 2, 3, 9, 9, 9, 1, 2], 2, {}) == {3: 2}
    seq = SequenceState([1, 2, 3, 9, 9, 9, 1, 2], generator_for(0))
    c = Candidates.dense(torch.zeros(1, 10))
    common = {"multiplier": 1.0, "base": 2.0, "allowed_length": 2, "breakers": {}}
    assert dry(c, [seq], last_n=8, **common).z[0, 3] == -1
    assert dry(c, [seq], last_n=7, **common).z[0, 3] == 0
    assert dry(c, [seq], last_n=0, **common).z[0, 3] == 0


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A byte-level tokenizer with a few longer tokens, and merges that make them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), (".", "Ċ"), ("x", "a")]
    pieces = alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_breakers_stand_inside_tokens_or_across_them(words):
    ids = {piece: words.token_to_id(piece) for piece in ("a", "b", "ab", "abc", "xa", "Ċ", ".Ċ")}
    assert breakers_of(words, ["\n"]) == {ids["Ċ"]: ((),), ids[".Ċ"]: ((),)}
    found = breakers_of(words, ["ab"])
    assert found == {
        ids["ab"]: ((),),
        ids["abc"]: ((),),
        ids["a"]: ((ids["b"],),),
        ids["xa"]: ((ids["b"],),),
    }


def test_dry_through_the_sampler_stops_at_a_breaker(words):
    text, broken = words.encode("12341234").ids, words.encode("1234\n1\n234").ids
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=2)
    sampler = Sampler.from_params(params, tokenizer=words)
    z = torch.zeros(1, words.get_vocab_size())
    one = words.token_to_id("1")
    assert float(sampler.process(z, [sampler.start(text)]).z[0, one]) == pytest.approx(-(1.75**2))
    newline = words.token_to_id("Ċ")
    after = sampler.process(z, [sampler.start(broken)]).z[0]
    assert float(after[newline]) == 0  # it would extend "234", but a breaker is never penalised
    assert (after == 0).all()


def test_dry_without_a_tokenizer_says_what_to_do():
    with pytest.raises(BadInput, match="give tokenizer=, or set dry_sequence_breakers"):
        Sampler.from_params(SamplingParams(dry_multiplier=1.0))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 9), max_size=8),
    output=st.lists(st.integers(0, 9), max_size=8),
    n=st.integers(-1, 20),
)
def test_history_is_the_tail_of_prompt_and_output(prompt, output, n):
    seq = SequenceState(prompt, generator_for(0))
    for token in output:
        seq.accept(token)
    whole = [*prompt, *output]
    assert seq.history(n) == (whole if n < 0 else whole[max(len(whole) - n, 0) :])
    assert set(seq.seen(None).tolist()) == set(whole)
    tally = seq.tally(None)
    assert dict(zip(tally.ids.tolist(), tally.counts.tolist(), strict=True)) == {
        token: output.count(token) for token in output
    }


def test_a_copy_of_a_sequence_goes_its_own_way():
    seq = SequenceState([1, 2], generator_for(5), mu=3.0)
    seq.accept(4)
    copy = seq.copy()
    first = copy.uniform()
    copy.accept(9)
    assert seq.output_ids == [4]
    assert 9 not in seq.seen(None)
    assert seq.uniform() == first
