"""The real `openai` client for Python: what it sends is understood, what it gets it can read."""

import json

import pytest
from serving import Live

openai = pytest.importorskip("openai", reason="needs the openai client (extra `test`)")
pytestmark = pytest.mark.model


@pytest.fixture
def client(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(
        openai.NotFoundError, match="no model 'gpt-9' here; this server serves only 'tiny'"
    ):
        client.models.retrieve("gpt-9")


def test_completions_plain_and_streamed_say_the_same(client) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked, logprobs=2)
    parts = list(
        client.completions.create(
            **asked, logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert plain.usage.completion_tokens == 12
    assert plain.usage.prompt_tokens == 4
    assert parts[-1].choices == []
    assert parts[-1].usage == plain.usage
    chunks = [part.choices[0] for part in parts[:-1]]
    assert "".join(chunk.text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].finish_reason == plain.choices[0].finish_reason == "length"
    reported = plain.choices[0].logprobs
    assert len(reported.tokens) == len(reported.token_logprobs) == len(reported.top_logprobs) == 12
    assert len(reported.text_offset) == 12
    # greedy: the drawn token is the best one, to the last bit
    assert reported.token_logprobs == [max(top.values()) for top in reported.top_logprobs]
    assert [t for chunk in chunks for t in chunk.logprobs.tokens] == reported.tokens
    assert [t for chunk in chunks for t in chunk.logprobs.token_logprobs] == reported.token_logprobs
    assert [t for chunk in chunks for t in chunk.logprobs.text_offset] == reported.text_offset


def test_several_prompts_and_several_choices_each(client) -> None:
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 1.0, "seed": 7}
    texts = ["Hello there", "One two three"]
    both = client.completions.create(prompt=texts, n=3, **asked)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert len({choice.text for choice in both.choices}) == 6
    alone = client.completions.create(prompt=texts[1], n=3, **asked)
    assert [c.text for c in alone.choices] == [c.text for c in both.choices[3:]]
    ids = client.completions.create(prompt=[[19556, 665], [1675]], **asked)
    assert len(ids.choices) == 2
    assert ids.usage.prompt_tokens == 3
    first = client.completions.create(prompt=[19556, 665], **asked)
    assert first.choices[0].text == ids.choices[0].text


def test_chat_plain_and_streamed_say_the_same(client) -> None:
    asked = {
        "model": "tiny",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        "max_completion_tokens": 9,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 3,
    }
    plain = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    message = plain.choices[0].message
    assert message.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == plain.choices[0].finish_reason == "length"
    rows = plain.choices[0].logprobs.content
    assert len(rows) == 9
    assert all(len(row.top_logprobs) == 3 for row in rows)
    streamed = [row for p in parts for row in p.choices[0].logprobs.content]
    assert streamed == rows
    for row in rows:
        text = bytes(row.bytes).decode("utf-8", "replace")
        assert row.token == text or row.token.startswith("bytes:\\x")


def test_json_schema_is_kept(client) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "How old?"}], "seed": 1}
    made = client.chat.completions.create(response_format=form, max_tokens=64, **asked)
    assert made.choices[0].finish_reason == "stop"
    assert 0 <= json.loads(made.choices[0].message.content)["age"] <= 99
    parts = client.chat.completions.create(
        response_format=form, max_tokens=64, stream=True, **asked
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == made.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"model": "other"}, "model", "serves only"),
        ({"prompt": "x " * 2000}, "prompt", "tokens, but tiny reads at most 1,024"),
        ({"prompt": [[99999]]}, "prompt", "99,999"),
        ({"temperature": -1}, "temperature", "is -1; expected at least 0"),
        ({"max_tokens": "many"}, "max_tokens", "expected a whole number"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"n": 100000}, "n", "at most"),
        ({"stop": [""]}, "stop", "empty"),
        ({"logit_bias": {"soup": 1}}, "logit_bias", "soup"),
        ({"extra_body": {"steering": [{"name": "none"}]}}, "steering", "no steering vector"),
        ({"extra_body": {"order": "sideways"}}, "order", "sideways"),
    ],
)
def test_errors_have_openais_form(client, change: dict, param: str | None, said: str) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 2} | change
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**asked)
    error = caught.value
    assert error.status_code in (400, 404)
    assert set(error.body) == {"message", "type", "param", "code"}
    assert error.body["param"] == param
    assert said in error.body["message"]
    assert "Traceback" not in error.response.text


@pytest.mark.parametrize("name", ["tools", "functions", "tool_choice", "audio", "top_logprobs"])
def test_what_chat_does_not_have_is_refused_by_name(client, name: str) -> None:
    more = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "functions": [{"name": "f"}],
        "tool_choice": "required",
        "audio": {"voice": "x"},
        "top_logprobs": 3,
    }[name]
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body={name: more}
        )
    assert caught.value.body["param"] == name
