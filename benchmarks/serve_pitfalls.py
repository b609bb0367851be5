"""What small OpenAI-style servers get wrong: ask any server, and tell which of it that one passes.

    lmhead serve -m smollm2-135m --cors http://page.example
    python benchmarks/serve_pitfalls.py http://127.0.0.1:8401 --model smollm2-135m \
        --tokenizer FOLDER --pid PID --json ours.json
    python benchmarks/serve_pitfalls.py --table lmhead=ours.json other=theirs.json

Only HTTP is used, so that every server is asked alike; `--tokenizer` is the folder of the model,
for prompts that are ids. `--pid` is the server's process: whether it goes on computing for a client
that has left shows in its CPU time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

PROMPT = "The capital of France is"
LLAMA = "🦙"
ORIGIN = "http://page.example"
HALF = "�"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Untold(Exception):
    """It could not be found out."""


class Server:
    """A server, and how to ask it."""

    def __init__(self, url: str, model: str, tokenizer: Any, key: str | None, pid: int | None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/")
        # a connection for each request: one that the server closed meanwhile tells nothing of it
        alone = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=self.url, timeout=600, headers=headers, limits=alone)
        self.model, self.tokenizer, self.pid = model, tokenizer, pid

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.model, **body})

    def complete(self, **body: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body}
        return _good(self.post("/v1/completions", **body))

    def chat(self, content: str = "Say hello.", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **body}
        return _good(self.post("/v1/chat/completions", **body))

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        body = {"model": self.model, "max_tokens": 8, "temperature": 0, "stream": True, **body}
        with self.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, f"status {reply.status_code}"
            lines = [line for line in reply.iter_lines() if line.startswith("data:")]
        return [json.loads(line[5:]) for line in lines if line[5:].strip() != "[DONE]"]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _good(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, f"status {reply.status_code}: {reply.text[:120]}"
    reported: dict[str, Any] = reply.json()
    return reported


def _text(reported: dict[str, Any]) -> str:
    return str(reported["choices"][0]["text"])


def _joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0].get("text") or "" for c in chunks if c.get("choices"))


def echo_with_logprobs(s: Server) -> None:
    """`echo` with `logprobs` scores the prompt (lm-eval needs it)."""
    reported = s.complete(echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert reported["text"].startswith(PROMPT), "the prompt is not echoed"
    rows = reported["logprobs"]["token_logprobs"]
    n = len(s.ids(PROMPT))
    assert len(rows) >= n, f"{len(rows)} log-probabilities for a prompt of {n} tokens"
    scored = [p for p in rows[1:n] if p is not None]
    assert len(scored) == n - 1, "the prompt's tokens have none"
    assert all(-1000 < p <= 0 for p in scored), f"they are {scored}"


def token_prompts(s: Server) -> None:
    """A prompt may be a list of ids, or a list of such lists."""
    ids = s.ids(PROMPT)
    expected = _text(s.complete())
    assert _text(s.complete(prompt=ids)) == expected, "ids give another text"
    both = s.complete(prompt=[ids, ids[:3]])["choices"]
    assert len(both) == 2, f"{len(both)} choices for two prompts"
    assert both[0]["text"] == expected, "a list of lists gives another text"


def legacy_shape(s: Server) -> None:
    """Completions tell log-probabilities in their own shape."""
    reported = s.complete(logprobs=2)["choices"][0]["logprobs"]
    wanted = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert reported is not None, "no logprobs"
    assert wanted <= set(reported), f"the fields are {sorted(reported)}"


def chat_shape(s: Server) -> None:
    """Chat tells log-probabilities in its own shape."""
    reported = s.chat(logprobs=True, top_logprobs=2)["choices"][0].get("logprobs")
    assert (reported or {}).get("content"), "no logprobs.content"
    one = reported["content"][0]
    assert {"token", "logprob", "bytes", "top_logprobs"} <= set(one), (
        f"the fields are {sorted(one)}"
    )
    assert len(one["top_logprobs"]) == 2, (
        f"{len(one['top_logprobs'])} alternatives, 2 were asked for"
    )


def half_bytes(s: Server) -> None:
    """`bytes` of a token that is half a character are that half."""
    first = s.ids(LLAMA)[0]
    reported = s.chat(logit_bias={str(first): 100}, max_tokens=1, logprobs=True)["choices"][0]
    assert (reported.get("logprobs") or {}).get("content"), "no logprobs.content"
    given = reported["logprobs"]["content"][0]["bytes"]
    start = list(LLAMA.encode())
    assert given, "no bytes"
    assert given == start[: len(given)], f"the bytes are {given}, the character begins {start}"


def no_collapse(s: Server) -> None:
    """Alternatives of the same text (halves of characters) are all told."""
    ids = s.ids(LLAMA * 6)[:-1]
    reported = s.complete(prompt=ids, logprobs=5, max_tokens=1)["choices"][0]["logprobs"]
    found = len(reported["top_logprobs"][0])
    assert found >= 5, f"{found} of 5 alternatives"


def streamed_logprobs(s: Server) -> None:
    """Streams carry log-probabilities too."""
    chunks = s.chunks("/v1/completions", prompt=PROMPT, logprobs=1)
    rows = [c["choices"][0].get("logprobs") for c in chunks if c.get("choices")]
    n = sum(len(row["tokens"]) for row in rows if row)
    assert n == 8, f"completions: {n} of 8 tokens have one"
    messages = [{"role": "user", "content": "Count from 1 to 20."}]
    chunks = s.chunks("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=1)
    parts = [c["choices"][0].get("logprobs") for c in chunks if c.get("choices")]
    n = sum(len(part["content"]) for part in parts if part and part.get("content"))
    assert n == 8, f"chat: {n} of 8 tokens have one"


def raw_and_processed(s: Server) -> None:
    """Log-probabilities before and after the sampler can both be had."""
    asked = {"logprobs": 1, "temperature": 0.25, "seed": 4, "max_tokens": 1}
    found = {
        mode: s.complete(**asked, logprobs_mode=mode)["choices"][0]["logprobs"]["token_logprobs"][0]
        for mode in ("raw", "processed")
    }
    assert abs(found["raw"] - found["processed"]) > 1e-3, "there is one kind alone"


def usage_in_stream(s: Server) -> None:
    """`stream_options.include_usage` gives a last chunk with usage and no choices."""
    chunks = s.chunks("/v1/completions", prompt=PROMPT, stream_options={"include_usage": True})
    last = chunks[-1]
    assert last.get("usage"), "the last chunk has no usage"
    assert last["choices"] == [], "the chunk with usage has choices"
    assert last["usage"]["completion_tokens"] == 8, f"it says {last['usage']}"


def no_stop_leaks(s: Server) -> None:
    """No part of a stop text that spans tokens is shown, streamed or not."""
    whole = _text(s.complete(max_tokens=24))
    middle = len(whole) // 2
    stop = whole[middle : middle + 9]
    expected = whole[: whole.index(stop)]
    reported = s.complete(max_tokens=24, stop=[stop])["choices"][0]
    assert reported["text"] == expected, f"{reported['text']!r}, not {expected!r}"
    assert reported["finish_reason"] == "stop", f"finish_reason is {reported['finish_reason']!r}"
    found = _joined(s.chunks("/v1/completions", prompt=PROMPT, max_tokens=24, stop=[stop]))
    assert found == expected, f"streamed: {found!r}, not {expected!r}"


def whole_characters(s: Server) -> None:
    """No chunk of a stream holds half a character."""
    asked = {"prompt": " ".join([LLAMA] * 12), "max_tokens": 24}
    whole = _text(s.complete(**asked)).rstrip(HALF)
    if LLAMA not in whole:
        raise Untold("the model says no emoji")
    texts = [c["choices"][0].get("text") or "" for c in s.chunks("/v1/completions", **asked)
             if c.get("choices")]  # fmt: skip
    assert not any(HALF in text for text in texts[:-1]), "a chunk holds half a character"
    assert "".join(texts).rstrip(HALF) == whole, "the stream gives another text"


def several_choices(s: Server) -> None:
    """`n` choices are `n` choices."""
    reported = s.complete(n=3, temperature=1, seed=1)["choices"]
    assert len(reported) == 3, f"{len(reported)} choices, 3 were asked for"
    assert len({one["text"] for one in reported}) > 1, "they are all the same"


def own_seed(s: Server) -> None:
    """A seed repeats its own request, and no other."""

    def draw(**more: Any) -> str:
        return _text(s.complete(temperature=1, max_tokens=16, **more))

    first, free, again, free_again = draw(seed=7), draw(), draw(seed=7), draw()
    assert first == again, "the same seed gives another text"
    assert free != free_again, "a request without a seed follows the one before it"


def errors_as_objects(s: Server) -> None:
    """Errors are 4xx with {"error": {...}}."""
    path = "/v1/completions"
    replies = {
        "a wrong type": s.post(path, prompt=PROMPT, temperature="hot"),
        "a value out of range": s.post(path, prompt=PROMPT, temperature=-3),
        "no JSON": s.client.post(path, content=b"{", headers={"Content-Type": "application/json"}),
    }
    for name, reply in replies.items():
        assert 400 <= reply.status_code < 500, f"{name}: status {reply.status_code}"
        try:
            error = reply.json()["error"]
            assert {"message", "type"} <= set(error)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise AssertionError(f"{name}: {reply.text[:80]}") from None


def unknown_fields(s: Server) -> None:
    """Fields that nobody knows yet pass."""
    s.complete(some_new_field={"a": 1})


def unsupported_refused(s: Server) -> None:
    """What is known but not supported is refused, not ignored (`best_of`)."""
    reply = s.post("/v1/completions", prompt=PROMPT, max_tokens=8, best_of=3, temperature=1)
    if 400 <= reply.status_code < 500:
        return
    used = _good(reply)["usage"]["completion_tokens"]
    assert used > 8, f"best_of=3 is ignored: {used} tokens were drawn"


def max_completion_tokens(s: Server) -> None:
    """Chat takes `max_completion_tokens`."""
    reported = s.chat("Count from 1 to 50.", max_tokens=None, max_completion_tokens=3)
    used = reported["usage"]["completion_tokens"]
    assert used == 3, f"{used} tokens, 3 were asked for"


def json_schema(s: Server) -> None:
    """`response_format` json_schema binds the reply."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
    }
    reported = s.chat("Tell me a joke.", response_format=form, max_tokens=40)
    text = reported["choices"][0]["message"]["content"]
    try:
        found = json.loads(text)
    except ValueError:
        raise AssertionError(f"no JSON: {text[:60]!r}") from None
    assert found in ({"city": "Paris"}, {"city": "Rome"}), f"it is {found}"


def preflight(s: Server) -> None:
    """A CORS preflight, which comes without the key, is answered."""
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = httpx.options(s.url + "/v1/completions", headers=asked, timeout=60)
    assert reply.status_code < 300, f"status {reply.status_code}"
    allowed = reply.headers.get("access-control-allow-origin")
    assert allowed in ("*", ORIGIN), f"allowed origin: {allowed}"


def disconnect_cancels(s: Server) -> None:
    """Who leaves is computed for no longer."""
    if s.pid is None:
        raise Untold("needs --pid")
    body = {"model": s.model, "prompt": PROMPT, "max_tokens": 1500, "stream": True, "seed": 3,
            "logit_bias": {str(i): -100 for i in s.tokenizer.all_special_ids}}  # fmt: skip
    with s.client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, f"status {reply.status_code}"
        for n, _ in enumerate(reply.iter_lines()):
            if n > 8:
                break
    time.sleep(3)
    before = _cpu(s.pid)
    time.sleep(4)
    used = _cpu(s.pid) - before
    assert used < 0.8, f"{used:.1f} s of CPU in 4 s, begun 3 s after the client left"


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


CHECKS: tuple[Callable[[Server], None], ...] = (
    echo_with_logprobs, token_prompts, legacy_shape, chat_shape, half_bytes, no_collapse,
    streamed_logprobs, raw_and_processed, usage_in_stream, no_stop_leaks, whole_characters,
    several_choices, own_seed, errors_as_objects, unknown_fields, unsupported_refused,
    max_completion_tokens, json_schema, preflight, disconnect_cancels,
)  # fmt: skip


def ask(
    s: Server, reported: Callable[[str], None] = lambda line: None, only: Sequence[str] = ()
) -> dict[str, str]:
    """Return for each check "pass", "? why it could not be found out" or what is wrong."""
    found = {}
    for check in CHECKS:
        if only and check.__name__ not in only:
            continue
        try:
            check(s)
            found[check.__name__] = "pass"
        except Untold as why:
            found[check.__name__] = f"? {why}"
        except AssertionError as wrong:
            found[check.__name__] = str(wrong)
        except httpx.TransportError as error:  # the connection broke: no answer is no verdict
            found[check.__name__] = f"? {type(error).__name__}: {error}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as wrong:
            found[check.__name__] = f"{type(wrong).__name__}: {wrong}"
        reported(f"{check.__name__}: {found[check.__name__]}")
    return found


def table(files: list[str]) -> str:
    """Put the results of several servers side by side, as Markdown."""
    columns = {name: json.loads(Path(path).read_text()) for name, path in
               (file.split("=", 1) for file in files)}  # fmt: skip
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for check in CHECKS:
        cells = []
        for results in columns.values():
            result = results[check.__name__]
            cells.append({"pass": "yes"}.get(result, "?" if result.startswith("?") else "no"))
        title = (check.__doc__ or "").removesuffix(".")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    passed = [sum(v == "pass" for v in results.values()) for results in columns.values()]
    lines.append("| of " + f"{len(CHECKS)} | " + " | ".join(map(str, passed)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="?", help="The server, without /v1.")
    parser.add_argument("--model", default="smollm2-135m", help="What the server calls the model.")
    parser.add_argument("--tokenizer", help="The folder of the model.")
    parser.add_argument("--key")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--json", type=Path, help="Write the results here.")
    parser.add_argument("--only", nargs="+", default=(), metavar="CHECK", help="Only these.")
    parser.add_argument("--table", nargs="+", metavar="NAME=FILE")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    with Server(given.url, given.model, tokenizer, given.key, given.pid) as server:
        found = ask(server, lambda line: print(line, flush=True), given.only)
    if given.json:
        if given.only and given.json.exists():
            found = json.loads(given.json.read_text()) | found
        given.json.write_text(json.dumps(found, indent=1))
    passed = sum(result == "pass" for result in found.values())
    print(f"{passed} of {len(found)}")
    sys.exit(passed != len(found))


if __name__ == "__main__":
    main()
