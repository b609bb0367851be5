"""Any settings that transformers takes: the same ids from a patched model, or an error in both.

`LMHEAD_FUZZ_EXAMPLES` sets how many settings are tried.
"""

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmhead.patch import patch_generate
from patched_models import V, ids_of, tiny

EXAMPLES = int(os.environ.get("LMHEAD_FUZZ_EXAMPLES", "25"))
IDS = st.integers(0, V - 1)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "do_sample": st.booleans(),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 400]),
        "top_p": st.sampled_from([0.01, 0.2, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.001, 0.05, 0.3, 1.0]),
        "temperature": st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.5, 4.0]),
        "typical_p": st.sampled_from([0.3, 0.9, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.2, 3.0]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "bad_words_ids": st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=4),
        "sequence_bias": st.dictionaries(
            st.lists(IDS, min_size=1, max_size=2).map(tuple), st.floats(-20, 20), min_size=1
        ),
        "suppress_tokens": st.lists(IDS, min_size=1, max_size=5),
        "min_new_tokens": st.integers(0, 6),
        "num_return_sequences": st.just(2),
        "num_beams": st.sampled_from([1, 1, 1, 2]),
        "use_cache": st.booleans(),
        "renormalize_logits": st.booleans(),
        "output_scores": st.booleans(),
    },
)
Pairs = dict[tuple[str, torch.dtype], tuple[Any, Any]]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Models as they were and patched, on the same weights; what they need is compiled here.

    To compile takes most of a minute where no other test has done so: not within an example.
    """
    found: Pairs = {}
    for name in ("llama", "gemma2 softcap"):
        for dtype in (torch.float32, torch.bfloat16):
            model = patch_generate(tiny(name).to(dtype))
            found[name, dtype] = copy.copy(model), model
            for asked in ({}, {"do_sample": True, "top_k": 0, "top_p": 0.9}):
                ids_of(model, {**asked, "max_new_tokens": 1})
    return found


@pytest.mark.timeout(1800)  # a busy machine may take long to compile
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["llama", "gemma2 softcap"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    SETTINGS,
    st.integers(0, 99),
)
def test_any_settings(
    pairs: Pairs, name: str, dtype: torch.dtype, asked: dict[str, Any], seed: int
) -> None:
    plain, model = pairs[name, dtype]
    asked = {**asked, "max_new_tokens": 6, "return_dict_in_generate": True}
    if asked.get("num_return_sequences") == 2 and not asked.get("do_sample"):
        del asked["num_return_sequences"]
    try:
        want = ids_of(plain, asked, seed)
    except (ValueError, RuntimeError) as error:
        with pytest.raises(type(error)):
            ids_of(model, asked, seed)
        return
    got = ids_of(model, asked, seed)
    if not torch.equal(got, want):
        again = torch.equal(ids_of(plain, asked, seed), want)
        pytest.fail(f"{got.tolist()} instead of {want.tolist()}; plain says so again: {again}")
