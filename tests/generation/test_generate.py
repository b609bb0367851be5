"""Generation on the real model: the same tokens as transformers, and every promise of ours."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from lmhead.errors import BadInput, LMHeadWarning
from lmhead.generation import generate, next_tokens, score_text, stream
from lmhead.head import Head, TopK
from lmhead.loading import Model
from lmhead.sampling import SamplingParams

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "In 1969, the first",
    "Q: What is 17 + 25?\nA:",
    "The quick brown fox",
    "Dear Sir or Madam,",
    "1, 2, 3, 4,",
    "Le chat est",
    "To be, or not to be,",
    "import numpy as np\n",
    "The three laws of thermodynamics are",
    "She opened the door and",
    "Ingredients: flour, sugar,",
    "Water boils at",
    "My favourite colour is",
    '{\n  "name":',
    "WARNING:",
    "Photosynthesis is the process by which",
    "A",
)


def theirs(model: Model, prompt: str, max_tokens: int, **options: object) -> list[int]:
    """What transformers' own generate adds to a prompt, up to and including its end token."""
    ids = torch.tensor([model.encode(prompt)])
    out = model.body.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=model.stop_ids[0],
        **options,
    )
    return out[0, ids.shape[1] :].tolist()


def test_greedy_ids_are_those_of_transformers(model: Model) -> None:
    ours = generate(PROMPTS, model, max_tokens=64, batch_size=1)
    for result in ours:
        assert list(result.ids) == theirs(model, result.prompt, 64)


def test_beam_ids_are_those_of_transformers(model: Model) -> None:
    for result in generate(PROMPTS[:6], model, max_tokens=24, beams=4):
        assert list(result.ids) == theirs(model, result.prompt, 24, num_beams=4)


def test_beams_that_end_are_those_of_transformers(model: Model) -> None:
    prompt = "Say hello."
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    result = generate(prompt, model, max_tokens=60, beams=3, chat=True)[0]
    assert list(result.ids) == theirs(model, text, 60, num_beams=3)
    assert result.finish_reason == "stop"


def test_a_seeded_sequence_is_the_same_alone_and_in_a_batch(model: Model) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32}
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
    batch = generate(PROMPTS[:8], model, params=params, max_tokens=32, batch_size=8)
    for i in (0, 3, 7):
        alone = generate(PROMPTS[i], model, seed=7, **options)[0]
        assert alone.ids == batch[i].ids


def test_samples_of_one_seed_differ_and_repeat(model: Model) -> None:
    options = {"temperature": 1.0, "seed": 3, "samples": 3, "max_tokens": 12}
    first = generate("Once upon a time", model, **options)
    assert len({r.ids for r in first}) == 3
    assert [r.ids for r in first] == [r.ids for r in generate("Once upon a time", model, **options)]


def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(model: Model) -> None:
    """Left padding and leaving the batch early must change nothing."""
    together = generate(PROMPTS[:5], model, max_tokens=16, batch_size=5, stop="\n")
    alone = generate(PROMPTS[:5], model, max_tokens=16, batch_size=1, stop="\n")
    assert [r.text for r in together] == [r.text for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]


def test_streamed_pieces_are_the_text(model: Model) -> None:
    whole = generate("The snowman ☃ said: é", model, max_tokens=24)[0].text
    assert "".join(stream("The snowman ☃ said: é", model, max_tokens=24)) == whole


def test_stop_strings_are_removed_and_named(model: Model) -> None:
    result = generate("The capital of France is", model, stop=["Paris", "zzz"])[0]
    assert (result.text, result.finish_reason, result.stopped_by) == (" ", "stop", "Paris")


def test_stop_ids_and_min_tokens(model: Model) -> None:
    paris = 7042
    prompt = "The capital of France is"
    assert generate(prompt, model, stop_ids=(paris,))[0].ids == (paris,)
    later = generate(prompt, model, stop_ids=(paris,), min_tokens=3, max_tokens=8)[0]
    assert paris not in later.ids[:3]


def test_logprobs_are_those_of_the_model(model: Model) -> None:
    result = generate("The capital of France is", model, max_tokens=3, logprobs=2)[0]
    assert result.logprobs is not None
    with torch.no_grad():
        z = model.head(model.last_hidden(list(result.prompt_ids)))
    expected = torch.log_softmax(z.double(), -1)[result.ids[0]]
    assert result.logprobs[0].logprob == pytest.approx(float(expected), abs=1e-5)
    assert max(result.logprobs[0].top.values()) == result.logprobs[0].logprob
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["ids"] == list(result.ids)


def test_rows_without_a_token_are_never_drawn(model: Model) -> None:
    """A head whose padding rows score highest still gives only tokens."""

    class Padded(Head):
        vocab_size, hidden_size, sha256 = model.head.vocab_size + 64, model.head.hidden_size, ""

        def __call__(self, h: torch.Tensor, *, from_block: bool = False) -> torch.Tensor:
            return torch.nn.functional.pad(model.head(h, from_block=from_block), (0, 64), value=1e4)

    expected = generate("The capital of France is", model, max_tokens=5)[0].ids
    assert (
        generate("The capital of France is", model, max_tokens=5, head=Padded())[0].ids == expected
    )  # type: ignore[arg-type]


def test_any_engine_with_the_verbs_gives_the_same_greedy_tokens(model: Model) -> None:
    """An engine that is not LMHead is asked for its topk alone."""
    asked = []

    class Engine(Head):
        vocab_size, hidden_size, sha256 = model.head.vocab_size, model.head.hidden_size, ""

        def __call__(self, h: torch.Tensor, *, from_block: bool = False) -> torch.Tensor:
            raise AssertionError("the full logits were not needed")

        def topk(self, h: torch.Tensor, k: int, **options: Any) -> TopK:
            asked.append(k)
            return model.head.topk(h, k, **options)

        def sample(self, *_: object, **__: object) -> torch.Tensor:
            raise AssertionError("not used")

    engine = Engine()
    assert (
        generate("Water boils at", model, max_tokens=8, head=engine)[0].ids  # type: ignore[arg-type]
        == generate("Water boils at", model, max_tokens=8)[0].ids
    )
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5, "max_tokens": 8}
    assert (
        generate("Water boils at", model, head=engine, **options)[0].ids  # type: ignore[arg-type]
        == generate("Water boils at", model, **options)[0].ids
    )
    assert set(asked) == {1, 20}


def test_a_json_schema_holds_at_temperature_1_5(model: Model) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=1.5, json_schema=schema, seed=1)
    results = generate(
        "A person as JSON:", model, params=params, samples=50, max_tokens=96, batch_size=25
    )
    for result in results:
        value = json.loads(result.text)
        assert set(value) == {"name", "age"}
        assert isinstance(value["name"], str)
        assert isinstance(value["age"], int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"samples": 0}, "samples is 0"),
        ({"stop": ""}, "empty text"),
        ({"top_q": 0.5}, "did you mean 'top_"),
        ({"order": "openai", "top_k": 3}, "order 'openai' is unknown"),
        ({"params": SamplingParams(), "top_k": 3}, "give one or the other"),
        ({"beams": 3, "top_k": 3}, "give one or the other"),
        ({"stop": 3}, "stop is 3; expected a text"),
        ({"stop": [3]}, "stop holds 3"),
        ({"order": None}, "order is None; expected hf, vllm"),
        ({"head": "screened"}, r"head is 'screened'; expected an engine, such as lmhead.engine\("),
        ({"params": {"top_k": 3}}, "params is a dict; expected SamplingParams"),
    ],
)
def test_wrong_options(model: Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        generate("Hi", model, **options)  # type: ignore[arg-type]


def test_the_context_is_a_limit(model: Model) -> None:
    context = model.body.context
    assert context == 8192
    with pytest.raises(BadInput, match=r"reads at most 8,192"):
        model.encode("word " * 9000)
    assert model.room([0] * 8190, 64) == 2


def test_empty_prompt(model: Model) -> None:
    with pytest.raises(BadInput, match="empty"):
        generate("", model)


@pytest.mark.parametrize(
    "controls",
    [
        {"banned_ids": (7042,)},
        {"logit_bias": {7042: -3.0}},
        {"repetition_penalty": 1.3},
        {"order": ["frequency_penalty"], "frequency_penalty": 0.6},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_a_control_that_draws_nothing_stays_greedy(
    model: Model, controls: dict[str, object]
) -> None:
    first = generate(PROMPTS[0], model, max_tokens=8, **controls)[0]  # type: ignore[arg-type]
    assert generate(PROMPTS[0], model, max_tokens=8, **controls)[0].ids == first.ids  # type: ignore[arg-type]
    if "order" not in controls:
        zero = generate(PROMPTS[0], model, max_tokens=8, temperature=0.0, **controls)[0]  # type: ignore[arg-type]
        assert zero.ids == first.ids


def test_equal_samples_and_unfinished_grammars_are_warned_of(model: Model) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    with pytest.warns(LMHeadWarning, match="samples is 2, but nothing asks for randomness"):
        generate("Hi", model, samples=2, max_tokens=1)
    with pytest.warns(LMHeadWarning, match="2 of 2 texts ended at max_tokens, before the grammar"):
        results = generate(PROMPTS[:2], model, regex="[a-z]{40}", max_tokens=3)
    assert {r.finish_reason for r in results} == {"length"}


def test_ids_are_prompts(model: Model) -> None:
    ids = model.encode(PROMPTS[0])
    text = generate(PROMPTS[0], model, max_tokens=4)[0]
    for given in (ids, tuple(ids), [ids], torch.tensor(ids), list(np.array(ids))):
        (result,) = generate(given, model, max_tokens=4)  # type: ignore[arg-type]
        assert (result.ids, result.prompt_ids) == (text.ids, tuple(ids))
        assert result.prompt == PROMPTS[0]
    assert [r.ids for r in generate([ids, PROMPTS[0]], model, max_tokens=4)] == [text.ids] * 2
    assert "".join(stream(ids, model, max_tokens=4)) == text.text
    assert generate(ids, model, max_tokens=4, beams=2)[0].prompt == PROMPTS[0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "the prompt is None; expected a text, a list of ids"),
        (7, "the prompt is 7"),
        (["Hi", None], "the prompts hold None"),
        ([[1, 2], ["a"]], r"the prompts hold \['a'\]"),
        ([[]], r"the prompts hold \[\]"),
        ([49_152], "holds the id 49,152; .* ids from 0 to 49,151"),
        ([[3, -1]], "holds the id -1"),
    ],
)
def test_wrong_prompts(model: Model, prompts: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        generate(prompts, model)  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        stream(prompts, model)  # type: ignore[arg-type]  # at once, not when it is first read


def test_streams_take_the_options_of_one_text(model: Model) -> None:
    options = {"temperature": 0.9, "seed": 3, "stop": ["\n"], "chat": True, "max_tokens": 12}
    whole = generate("Say hello.", model, **options)[0].text  # type: ignore[arg-type]
    assert "".join(stream("Say hello.", model, **options)) == whole  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, banned_ids=(7042,))
    whole = generate(PROMPTS[0], model, params=params, max_tokens=4)[0].text
    assert "".join(stream(PROMPTS[0], model, params=params, max_tokens=4)) == whole
    for name in ("samples", "beams", "batch_size"):
        with pytest.raises(BadInput, match=f"{name} is an option of generate"):
            stream("Hi", model, **{name: 2})
    with pytest.raises(BadInput, match="stream got 2 prompts"):
        stream(["Hi", "Ho"], model)  # type: ignore[arg-type]


def test_options_are_checked_before_the_model_is_loaded() -> None:
    for options in ({"order": "hg"}, {"stop": ""}, {"beams": 2, "top_k": 3}, {"regex": "(("}):
        with pytest.raises(BadInput):
            generate("Hi", "no/model", **options)  # type: ignore[arg-type]
        with pytest.raises(BadInput):
            stream("Hi", "no/model", **options)


def test_a_model_in_memory_with_its_tokenizer(model: Model) -> None:
    mine, tokenizer = model.body.model, model.tokenizer
    expected = generate(PROMPTS[0], model, max_tokens=4)[0]
    assert generate(PROMPTS[0], mine, tokenizer=tokenizer, max_tokens=4)[0] == expected
    assert "".join(stream(PROMPTS[0], mine, tokenizer=tokenizer, max_tokens=4)) == expected.text
    assert next_tokens(PROMPTS[0], mine, tokenizer=tokenizer).tokens[0].id == expected.ids[0]
    (reported,) = score_text([expected.ids], mine, tokenizer=tokenizer, prompt=PROMPTS[0])
    assert reported.tokens[0] == " Paris"
    with pytest.raises(BadInput, match="tokenizer"):
        generate(PROMPTS[0], mine)
    with pytest.raises(BadInput, match="expected"):
        generate(PROMPTS[0], 3)  # type: ignore[arg-type]
