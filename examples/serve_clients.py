"""The openai client for Python, and litellm where it is there, against a running `lmhead serve`.

    lmhead serve -m smollm2-135m &
    pip install openai litellm
    python examples/serve_clients.py http://127.0.0.1:8401 smollm2-135m

It asks for the models, completions, chat, both as streams too, log-probabilities, a JSON schema and
two errors, prints one JSON object, and ends with an error where an answer is not as it should be.
"""

import argparse
import importlib.util
import json
import os
from typing import Any, Literal

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello."},
]


def ask_openai(url: str, model: str, key: str) -> dict[str, Any]:
    """Ask with OpenAI's client."""
    import openai
    import pydantic

    City: Any = pydantic.create_model("City", city=(Literal["Paris", "Rome"], ...))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    assert model in [one.id for one in client.models.list().data]
    asked: Any = {"model": model, "prompt": "The capital of France is", "max_tokens": 6,
                  "temperature": 0, "logprobs": 2}  # fmt: skip
    plain = client.completions.create(**asked)
    text = plain.choices[0].text
    assert len(plain.choices[0].logprobs.tokens) == plain.usage.completion_tokens
    parts = client.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].text for part in parts) == text
    talk: Any = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1,
                 "logprobs": True, "top_logprobs": 2}  # fmt: skip
    answer = client.chat.completions.create(**talk)
    said = answer.choices[0].message.content
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = client.chat.completions.create(**talk, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said
    held = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=City, max_tokens=40
    )
    errors = []
    wrong: list[tuple[Any, Any]] = [
        ({"model": "another", "prompt": "x"}, openai.NotFoundError),
        ({"model": model, "prompt": "x", "temperature": -1}, openai.BadRequestError),
    ]
    for body, kind in wrong:
        try:
            client.completions.create(**body)
        except kind as error:
            errors.append(error.body["message"])
    assert len(errors) == 2
    city = held.choices[0].message.parsed.city
    return {"completion": text, "chat": said, "json": {"city": city}, "errors": errors}


def ask_litellm(url: str, model: str, key: str) -> dict[str, Any]:
    """Ask with litellm."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    import litellm

    litellm.suppress_debug_info = True  # it prints advice to stdout with every error

    to: Any = {"api_base": f"{url}/v1", "api_key": key}
    talk: Any = {"model": f"openai/{model}", "messages": MESSAGES, "max_tokens": 6, "seed": 1,
                 "logprobs": True, "top_logprobs": 2, **to}  # fmt: skip
    answer = litellm.completion(**talk)
    said = answer.choices[0].message.content
    assert answer.choices[0].logprobs.content
    parts = litellm.completion(**talk, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said
    plain = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Hello", max_tokens=4, temperature=0, **to
    )
    assert plain.usage.completion_tokens == 4
    try:
        litellm.completion(**{**talk, "model": "openai/another"})
    except litellm.NotFoundError:
        return {"chat": said}
    raise AssertionError("another model was served")


def main() -> None:
    """Ask, and print what came."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8401")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    given = parser.parse_args()
    key = os.environ.get("LMHEAD_KEY", "none")
    reported = {"openai": ask_openai(given.url, given.model, key)}
    if importlib.util.find_spec("litellm") is not None:
        reported["litellm"] = ask_litellm(given.url, given.model, key)
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
