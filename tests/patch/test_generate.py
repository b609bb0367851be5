"""A patched model generates what it did before: the same ids, from the screen where it can."""

import copy
import gc
import io
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

import lmhead
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.patch import explain_generate, patch_generate, patch_loss, unpatch_generate
from lmhead.patch.asked import Asked
from lmhead.patch.certain import best, drawn
from patched_models import MODELS, PROMPTS, V, ids_of, tiny

DRAW: dict[str, Any] = {"do_sample": True}
ALL: dict[str, Any] = {"do_sample": True, "top_k": 0}
SCREENED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, no cache": {"use_cache": False},
    "repetition penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "no n-gram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 9], [11]]},
    "sequence bias": {"sequence_bias": {(3,): 2.5, (4, 5): -1.0, (17,): 4.0}},
    "min length": {"min_new_tokens": 6},
    "min length, all": {"min_length": 9},
    "suppress": {"suppress_tokens": [1, 2, 3, 44], "begin_suppress_tokens": [8, 9]},
    "many changes": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[6]],
        "sequence_bias": {(12,): 1.5},
        "min_new_tokens": 4,
        "suppress_tokens": [100],
    },
    "return dict": {"return_dict_in_generate": True},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "default draw": DRAW,
    "top_k": DRAW | {"top_k": 5},
    "top_k 1": DRAW | {"top_k": 1},
    "warm": DRAW | {"temperature": 1.7},
    "cold": DRAW | {"temperature": 0.2, "top_k": 20},
    "very cold": DRAW | {"temperature": 0.01},
    "top_k, top_p": DRAW | {"top_k": 40, "top_p": 0.8},
    "top_p 0.1": DRAW | {"top_p": 0.1, "temperature": 0.5},
    "top_k, min_p": DRAW | {"top_k": 30, "min_p": 0.2},
    "all three": DRAW | {"top_k": 60, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    "draw, changes": DRAW
    | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": {(9,): 3.0}},
    "draw, banned": DRAW | {"top_k": 10, "bad_words_ids": [[5], [7, 9]], "min_new_tokens": 5},
    "three of each": DRAW | {"num_return_sequences": 3, "top_k": 20},
    "temperature alone": ALL | {"temperature": 0.7},
    "warm, all": ALL | {"temperature": 1.5},
    "plain draw, all": ALL,
    "cold, all": ALL | {"temperature": 0.05},
    "top_p alone": ALL | {"top_p": 0.9},
    "top_p 0.3, cold": ALL | {"top_p": 0.3, "temperature": 0.6},
    "top_p 0.05": ALL | {"top_p": 0.05},
    "top_p 0.99, warm": ALL | {"top_p": 0.99, "temperature": 1.3},
    "min_p alone": ALL | {"min_p": 0.1},
    "min_p 0.02, warm": ALL | {"min_p": 0.02, "temperature": 1.5},
    "top_p, min_p": ALL | {"top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    "top_p, penalty": ALL | {"top_p": 0.9, "repetition_penalty": 1.3},
    "top_p, n-gram, bias": ALL
    | {"top_p": 0.8, "no_repeat_ngram_size": 2, "sequence_bias": {(9,): 3.0, (4, 5): -2.0}},
    "all, bans": ALL | {"bad_words_ids": [[5], [7, 9]], "min_new_tokens": 5},
    "min_p, suppress": ALL | {"min_p": 0.05, "suppress_tokens": [1, 2, 3, 44]},
    "top_p, three of each": ALL | {"top_p": 0.9, "num_return_sequences": 3},
    "top_p, return dict": ALL | {"top_p": 0.9, "return_dict_in_generate": True},
}
DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "typical": (DRAW | {"typical_p": 0.9}, "typical_p"),
    "epsilon": (DRAW | {"epsilon_cutoff": 0.01}, "epsilon_cutoff"),
    "eta": (DRAW | {"eta_cutoff": 0.01}, "eta_cutoff"),
    "top_h": (DRAW | {"top_h": 0.5}, "top_h"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "watermark": (
        {"watermarking_config": tf.WatermarkingConfig(bias=2.0, seeding_scheme="lefthash")},
        "watermark",
    ),
    "prefix": ({"prefix_allowed_tokens_fn": lambda _, ids: [5, 6, 7]}, "prefix_allowed_tokens_fn"),
    "renormalize": (DRAW | {"renormalize_logits": True}, "renormalize_logits"),
    "custom": (
        {"logits_processor": tf.LogitsProcessorList([lambda ids, scores: scores.roll(1, -1)])},
        "not known here",
    ),
    "own order": (
        {"logits_processor": tf.LogitsProcessorList([tf.TopKLogitsWarper(3)])},
        "top_k without do_sample",
    ),
    "forced end": ({"forced_eos_token_id": 2}, "forced last token"),
    "decay": ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay"),
    "wide": (DRAW | {"top_k": 1000}, "top_k is 1,000"),
}
ELSEWHERE: dict[str, tuple[dict[str, Any], str]] = {  # these never reach the loop
    "beams": ({"num_beams": 3}, "beam"),
    "drawn beams": (DRAW | {"num_beams": 2}, "beam"),
}
FULL = "LMHEAD_FULL_GRID" in os.environ  # else each model has its share of the settings


def share_of(place: int) -> dict[str, dict[str, Any]]:
    """Every fourth setting, others for each model; all of them in a full run."""
    return dict(list(SCREENED.items())[0 if FULL else place % 4 :: 1 if FULL else 4])


@pytest.mark.parametrize("name", MODELS)
def test_same_ids_from_the_screen(name: str) -> None:
    plain, model = tiny(name), patch_generate(tiny(name))
    grid = share_of(list(MODELS).index(name))
    for about, settings in grid.items():
        assert str(explain_generate(model, **settings)).startswith("screened"), about
        assert torch.equal(ids_of(model, settings), ids_of(plain, settings)), about
    stats = model.lmhead_stats
    assert (stats.screened, stats.dense) == (len(grid), 0)
    # Random weights put logits close together; of a real model's steps fewer are dense.
    assert stats.steps > 5 * stats.dense_steps


SIXTEEN = ["llama", "gpt2", "gemma2 softcap", "granite scaled"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS if FULL else SIXTEEN)
def test_same_ids_in_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    plain, model = tiny(name).to(dtype), patch_generate(tiny(name).to(dtype))
    biased = model.get_output_embeddings().bias is not None
    assert explain_generate(model).screened != biased
    for about, settings in share_of(SIXTEEN.index(name) if name in SIXTEEN else 0).items():
        assert torch.equal(ids_of(model, settings), ids_of(plain, settings)), about
    # a softcap of 3 makes most logits equal in 16 bits
    stats = model.lmhead_stats
    assert biased or stats.steps > 0.5 * stats.dense_steps


def test_exact_rounding_goes_by_the_exact_scores() -> None:
    """Two tokens whose logits are equal in bfloat16: `exact` takes the better, else the first."""
    model = tiny("llama").bfloat16()
    weight = model.lm_head.weight
    h = model.model(PROMPTS[1:]).last_hidden_state[0, -1]
    with torch.no_grad():
        weight[400] = h / h.norm() * 4  # by far the best
        weight[9] = weight[400]
        weight[9, h.abs().argmin()] *= 0.9  # a little less, too little for bfloat16
    logits = model(PROMPTS[1:]).logits[0, -1]
    exact = weight.double() @ h.double()
    assert logits[9] == logits[400] == logits.max()
    assert exact[400] > exact[9]
    asked = {"max_new_tokens": 1}
    plain = int(model.generate(PROMPTS[1:], **asked)[0, -1])
    reported = {}
    for rounding in ("as-model", "exact"):
        patch_generate(model, rounding=rounding)
        reported[rounding] = int(model.generate(PROMPTS[1:], **asked)[0, -1])
    assert reported == {"as-model": plain, "exact": 400}
    assert plain == 9


@pytest.mark.parametrize("name", ["llama", "gemma2 softcap"])
def test_same_ids_where_all_logits_are_needed(name: str) -> None:
    plain, model = tiny(name), patch_generate(tiny(name))
    for about, (settings, reason) in (DENSE | ELSEWHERE).items():
        path = explain_generate(model, **settings)
        assert not path.screened, about
        assert reason in path.reason, about
        assert torch.equal(ids_of(model, settings), ids_of(plain, settings)), about
    stats = model.lmhead_stats
    assert (stats.screened, stats.dense, stats.steps) == (0, len(DENSE), 0)
    assert sum(stats.reasons.values()) == stats.dense


def test_assisted_decoding_is_left_alone() -> None:
    plain, model, draft = tiny("llama"), patch_generate(tiny("llama")), tiny("llama", 1)
    one = {"input_ids": PROMPTS[1:]}
    got = []
    for settings in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 2}):
        assert "assisted" in explain_generate(model, **settings).reason
        got.append(model.generate(**one, **settings, max_new_tokens=10))
    got.append(plain.generate(**one, assistant_model=patch_generate(draft), max_new_tokens=10))
    want = plain.generate(**one, max_new_tokens=10)
    assert all(torch.equal(ids, want) for ids in got)
    assert (model.lmhead_stats.steps, draft.lmhead_stats.steps) == (0, 0)


def test_many_seeds() -> None:
    plain, model = tiny("qwen3"), patch_generate(tiny("qwen3"))
    settings = DRAW | {"top_k": 40, "top_p": 0.9, "max_new_tokens": 20}
    for seed in range(20):
        assert torch.equal(ids_of(model, settings, seed), ids_of(plain, settings, seed))
    assert model.lmhead_stats.steps > 20 * model.lmhead_stats.dense_steps


def test_ties_are_for_the_dense_layer() -> None:
    plain = tiny("llama")
    with torch.no_grad():
        plain.lm_head.weight[300:] = plain.lm_head.weight[:301].clone()  # every token has a twin
    model = patch_generate(copy.deepcopy(plain))
    for settings in ({}, DRAW | {"top_k": 7}, DRAW | {"top_k": 8, "top_p": 0.7}):
        assert torch.equal(ids_of(model, settings), ids_of(plain, settings))
    assert model.lmhead_stats.dense_steps >= 10  # no greedy step can be certain


def test_the_generator_is_where_it_would_have_been() -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    after = []
    for one in (plain, model):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            one.generate(PROMPTS[1:], do_sample=True, max_new_tokens=5)
            after.append(torch.get_rng_state())
    assert torch.equal(*after)


@pytest.mark.parametrize("seed", range(4))
def test_certain_is_certain(seed: int) -> None:
    """Whatever the logits are within their ends, what is called certain comes true.

    transformers' own cuts on other logits of the intervals are the judge; intervals are wide, so
    that borders are crossed all the time, or of no width at all, with ties.
    """
    rng = np.random.default_rng(seed)
    decided = 0
    for n in range(300):
        y = np.round(rng.normal(0, 2, 40), int(rng.integers(1, 6)))  # with ties
        e = rng.uniform(0, 1, 40) * 10.0 ** rng.uniform(-5, -1) * (n % 3 > 0)
        low, high = (torch.from_numpy(y + end).float().double().numpy() for end in (-e, e))
        asked = Asked(
            draws=True,
            top_k=int(rng.integers(1, 30)),
            top_p=[None, 0.3, 0.9, 0.0][n % 4],
            min_p=[None, 0.02, 0.3, 1.0][n // 4 % 4],
        )
        known = np.sort(np.argsort(-y)[: asked.top_k + 6])
        others = np.setdiff1d(np.arange(40), known)
        rest = float(high[others].max()) if len(others) else -np.inf
        q = torch.empty(40).exponential_(1, generator=torch.Generator().manual_seed(n))
        log_q = q.double().log().numpy()[known]
        kept = drawn(low[known], high[known], rest, log_q, asked)
        certain = best(low[known], high[known], rest)
        for _ in range(4):
            true = torch.from_numpy(np.choose(rng.integers(0, 3, 40), [low, y, high])).float()
            true = true.clamp(torch.from_numpy(low).float(), torch.from_numpy(high).float())[None]
            if certain:
                assert int(true.argmax()) == known[int(low[known].argmax())]
            if kept is None:
                continue
            decided += 1
            ours = torch.full((1, 40), -torch.inf)
            ours[0, known[kept]] = torch.from_numpy(low[known[kept]]).float()
            true = tf.TopKLogitsWarper(asked.top_k)(None, true)
            if asked.top_p is not None:
                true = tf.TopPLogitsWarper(asked.top_p)(None, true)
            if asked.min_p is not None:
                true = tf.MinPLogitsWarper(asked.min_p)(None, true)
            assert (true.softmax(-1) / q).argmax() == (ours.softmax(-1) / q).argmax()
    assert decided > 600


def test_a_streamer_and_what_it_does_meanwhile() -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    logits = plain(PROMPTS[1:]).logits

    class Watcher(tf.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.ids += value.flatten().tolist()
            with torch.no_grad():
                assert torch.equal(model(PROMPTS[1:]).logits, logits)

        def end(self) -> None:
            self.ended = True

    watcher = Watcher()
    ids = model.generate(PROMPTS[1:], max_new_tokens=8, streamer=watcher)
    assert watcher.ended
    assert (
        watcher.ids == ids[0].tolist() == plain.generate(PROMPTS[1:], max_new_tokens=8)[0].tolist()
    )
    assert model.lmhead_stats.steps == 8


def test_an_answer_does_not_depend_on_the_rest_of_the_batch() -> None:
    """1 to 16 rows: `exact` gives each row the token that it has alone."""
    model = patch_generate(tiny("llama"), rounding="exact")
    rows = torch.randint(3, V, (16, 6), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([model.generate(row[None], max_new_tokens=4) for row in rows])
    for size in (2, 3, 5, 16):
        together = torch.cat([model.generate(part, max_new_tokens=4) for part in rows.split(size)])
        assert torch.equal(together, alone)
    assert model.lmhead_stats.dense_steps == 0


def test_two_threads_at_once() -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    settings = [{"max_new_tokens": 20}, {"max_new_tokens": 20, "repetition_penalty": 1.4}]
    settings += [{"max_new_tokens": 20, "num_beams": 2}]
    want = [plain.generate(PROMPTS[1:], **one) for one in settings]
    want.append(plain(PROMPTS).logits)
    got: list[list[Tensor]] = [[] for _ in want]

    def run(n: int) -> None:
        for _ in range(6):
            if n < len(settings):
                got[n].append(model.generate(PROMPTS[1:], **settings[n]))
            else:
                with torch.no_grad():
                    got[n].append(model(PROMPTS).logits)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(want))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours) == 6
        assert all(torch.equal(one, theirs) for one in ours)
    assert model.lmhead_stats.screened == 12


def test_unpatching_leaves_nothing_behind() -> None:
    model = tiny("llama")
    kind, attributes, keys = type(model), set(vars(model)), list(model.state_dict())
    patch_generate(patch_generate(model))  # twice is once
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == "LlamaForCausalLM"
    unpatch_generate(unpatch_generate(model))
    assert type(model) is kind
    assert set(vars(model)) == attributes
    assert not hasattr(model, "lmhead_stats")
    with pytest.raises(BadInput, match="not patched"):
        explain_generate(model)


def test_saved_copied_pickled_and_freed(tmp_path: Path) -> None:
    plain, model = tiny("llama tied"), patch_generate(tiny("llama tied"))
    want = ids_of(plain, {})
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is tf.LlamaForCausalLM
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(ids_of(loaded, {}), want)

    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    other = copy.deepcopy(unpatch_generate(copy.deepcopy(twin)))
    assert torch.equal(ids_of(twin, {}), ids_of(other, {}))
    assert torch.equal(ids_of(model, {}), want)
    assert (model.lmhead_stats.screened, twin.lmhead_stats.screened) == (1, 1)

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=False)
    assert type(back) is tf.LlamaForCausalLM
    assert torch.equal(ids_of(back, {}), want)

    gone = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert gone() is None


def test_weights_that_change() -> None:
    model = patch_generate(tiny("llama"))

    def check(steps: bool) -> None:
        before = model.lmhead_stats.steps
        plain = unpatch_generate(copy.deepcopy(model))
        assert torch.equal(ids_of(model, {}), ids_of(plain, {}))
        assert (model.lmhead_stats.steps > before) == steps

    check(True)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(V, 32))
    check(True)
    model.lm_head.weight.data += torch.randn(V, 32)  # its version stays
    check(True)
    model.resize_token_embeddings(V + 64)
    check(True)
    assert explain_generate(model).screened
    torch.set_float32_matmul_precision("medium")
    try:
        assert "less than float32" in explain_generate(model).reason
    finally:
        torch.set_float32_matmul_precision("highest")
    assert explain_generate(model).screened
    model.train()
    assert explain_generate(model).reason == "the model is in training mode"
    model.eval()
    hook = model.lm_head.register_forward_hook(lambda layer, args, z: z.flip(-1))
    assert "hooks" in explain_generate(model).reason
    check(False)
    hook.remove()
    check(True)
    model.bfloat16()
    check(True)
    model.double()
    assert "float64" in explain_generate(model).reason
    check(False)
    model.float()
    check(True)
    model.lm_head = torch.nn.Sequential(model.lm_head)  # as an adapter does
    assert "Sequential" in explain_generate(model).reason
    model.lm_head = model.lm_head[0]
    model.compile()
    assert explain_generate(model).reason == "the model is compiled"


def test_both_patches() -> None:
    plain, model = tiny("llama"), patch_generate(patch_loss(tiny("llama")))
    assert torch.equal(ids_of(model, {}), ids_of(plain, {}))
    assert model.lmhead_stats.steps == 10
    want, got = (m(input_ids=PROMPTS, labels=PROMPTS).loss for m in (plain, model))
    torch.testing.assert_close(got, want)


def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="'auto' or 'always'"):
        patch_generate(tiny("llama"), screen="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="no `generate`"):
        patch_generate(torch.nn.Linear(3, 3))  # type: ignore[type-var]
    assert lmhead.patch_generate is patch_generate


def test_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmhead.head.screening.loops.can_compile", lambda: False)
    model = patch_generate(tiny("llama"))
    assert "numba" in explain_generate(model).reason
    assert explain_generate(patch_generate(model, screen="always")).screened
    assert torch.equal(ids_of(model, {}), ids_of(tiny("llama"), {}))


@pytest.fixture(scope="module")
def smollm() -> Any:
    return lmhead.load("smollm2-135m", dtype=torch.float32)


REAL = ["greedy", "many changes", "default draw", "all three", "draw, changes", "top_p alone"]
REAL += ["plain draw, all", "typical", "beams"]


def real_grid(tokenizer: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """What real models are asked, and why it is dense: some settings, or all in a full run."""
    grid = {about: (settings, "") for about, settings in SCREENED.items()} | DENSE | ELSEWHERE
    if not FULL:
        return {about: grid[about] for about in REAL}
    streamer = tf.TextStreamer(tokenizer)
    return grid | {
        "wide": (DENSE["wide"][0], ""),  # is less than all of a real vocabulary
        "streamer": ({"streamer": streamer}, ""),
        "streamer, draw": (ALL | {"streamer": streamer, "top_p": 0.9}, ""),
        "stop strings": ({"stop_strings": [".", "\n"], "tokenizer": tokenizer}, ""),
        "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "assisted"),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.model)]
)  # fmt: skip
def test_real_models(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Two prompts with padding, or one where transformers takes no more, then two threads."""
    folder = request.getfixturevalue(name)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The river", "The capital of France is"]
    one, two = (
        dict(tokenizer(some, return_tensors="pt", padding=True)) for some in (texts[:1], texts)
    )
    model = patch_generate(lmhead.load(folder, dtype=dtype).body.model)
    plain = copy.copy(model)
    counts = {"screened": 0, "dense": 0}
    for about, (settings, reason) in real_grid(tokenizer).items():
        path = explain_generate(model, **settings)
        assert path.screened == (not reason), about
        assert reason in path.reason, about
        counts["screened" if path.screened else "dense"] += 1
        alone = not {"streamer", "prompt_lookup_num_tokens"}.isdisjoint(settings)
        asked, prompts = {"max_new_tokens": 8} | settings, one if alone else two
        want = ids_of(plain, asked, prompts=prompts)
        assert torch.equal(ids_of(model, asked, prompts=prompts), want), about
    stats = model.lmhead_stats
    assert stats.screened == counts["screened"]
    assert stats.dense_steps <= 0.2 * stats.steps

    pair = [SCREENED["greedy"] | one, SCREENED["many changes"] | two]
    want = [plain.generate(**asked, max_new_tokens=12) for asked in pair]
    got: list[Any] = [None, None]

    def run(n: int) -> None:
        got[n] = model.generate(**pair[n], max_new_tokens=12)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    print(f"{name} {dtype}: {counts}; {model.lmhead_stats}")


def test_pipeline_and_text_streamer(smollm: Any) -> None:
    from transformers import AutoTokenizer, TextIteratorStreamer, pipeline

    model, tokenizer = smollm.body.model, AutoTokenizer.from_pretrained(smollm.folder)
    asked = {"do_sample": False, "max_new_tokens": 8, "return_full_text": False}
    want = pipeline("text-generation", model=model, tokenizer=tokenizer)("Paris is", **asked)
    patch_generate(model)
    try:
        writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert writer("Paris is", **asked) == want
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        inputs = tokenizer("Paris is", return_tensors="pt")
        settings = inputs | {"streamer": streamer, "max_new_tokens": 8, "do_sample": False}
        thread = threading.Thread(target=model.generate, kwargs=settings)
        thread.start()
        assert "".join(streamer) == want[0]["generated_text"]
        thread.join()
        assert model.lmhead_stats.screened == 2
        stopped = model.generate(
            **inputs, stop_strings=["."], tokenizer=tokenizer, max_new_tokens=20
        )
        assert model.lmhead_stats.screened == 3
    finally:
        unpatch_generate(model)
    again = model.generate(**inputs, stop_strings=["."], tokenizer=tokenizer, max_new_tokens=20)
    assert torch.equal(stopped, again)
