"""Bodies that nobody should send: no crash, no hang, no 5xx, every error in its form.

LMHEAD_HOSTILE=10000 sends that many; the suite sends fewer.
"""

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from serving import Live

pytestmark = pytest.mark.model

COUNT = int(os.environ.get("LMHEAD_HOSTILE", "250"))
SEED = int(os.environ.get("LMHEAD_HOSTILE_SEED", "17"))
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/choices",
    "/v1/next",
    "/v1/lens",
    "/tokenize",
    "/detokenize",
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "seed",
    "logit_bias",
    "response_format",
    "steering",
    "order",
    "json_schema",
    "regex",
    "grammar",
    "choices",
    "tokens",
    "top",
    "allowed_ids",
    "banned_ids",
    "stop_ids",
    "dry_multiplier",
    "typical_p",
    "mirostat",
    "xtc_probability",
    "repetition_penalty",
    "min_tokens",
    "max_completion_tokens",
    "suffix",
    "best_of",
    "user",
    "tools",
    "penalty_last_n",
    "dynatemp_range",
    "dry_sequence_breakers",
    "logprobs_mode",
    "add_special_tokens",
]
# what llguidance follows by recursion: rules that name rules
RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(9000)), 'r9000: "x"'])
REFS = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(3000)}
DEEP = {"$ref": "#/$defs/a0", "$defs": {**REFS, "a3000": {"type": "string"}}}
VALUES: tuple[Any, ...] = (
    RULES, DEEP, {"type": "json_schema", "json_schema": {"schema": DEEP}}, ["b"] * 5000,
    [f" choice {i}" for i in range(100)],
    None, True, False, 0, 1, -1, 2, 7, 0.5, 1e308, -1e-308, 2**31, 2**63, 2**64, 10**400, "", "a",
    "x" * 3000, "\x00", "\ud800", "🦙", "../../etc/passwd", "[" * 200, "{{7*7}}", "(a+)+$",
    [], [[]], {}, [0], [1, 2, 3], [-1], [10**9], ["a", "b"], [None], [[1], [2]], [["a"]], {"a": 1},
    {"7": 5}, {"7": "x"}, {"-1": 1}, {"type": "json_object"}, {"type": "text"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    [{"role": "user", "content": "Hi"}], [{"role": "tool", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user"}], [{"role": {}}],
    [{"name": "v1"}], [{"name": "../v1"}], [{"name": "v1", "alpha": 0}],
    [{"name": "v1", "alpha": 1e300, "kl_cap": 1e-300}], [{"name": "v0", "budget": 1e-30}],
    "hf", "vllm", "llama.cpp", ["top_k"], ["temperature", "temperature"], "raw", "processed",
    'start: "a" start', "start: /[a-z]{1,9}/", "[0-9]{3}", "a{1,999999999}", "(", "\\p{Zz}",
)  # fmt: skip
RAW: tuple[bytes, ...] = (
    b"", b"null", b"[]", b'"x"', b"{", b"{}}", b"\xff\xfe", b"\x00" * 50, b"[" * 100_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b'{"prompt": "a", "prompt": 7}', b"NaN",
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a"' + b" " * 100_000 + b"}", "{\"prompt\": \"\u2028\"}".encode(),
    b"\xef\xbb\xbf{}", '{"prompt": "a"}'.encode("utf-16"), b"prompt=a", b"--x\r\n\r\n--x--",
)  # fmt: skip
TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded", "", "x" * 200)


def hostile(rng: random.Random) -> tuple[str, bytes, str]:
    """Make an address, a body and a content type; most bodies are nearly right."""
    path = rng.choice(PATHS)
    kind = TYPES[0] if rng.random() < 0.9 else rng.choice(TYPES)
    if rng.random() < 0.2:
        content = bytearray(rng.choice(RAW))
        if content and rng.random() < 0.3:
            content[rng.randrange(len(content))] = rng.randrange(256)
        return path, bytes(content), kind
    body: dict[str, Any] = {"max_tokens": 2}
    if rng.random() < 0.8:
        body |= {"prompt": "Hello", "messages": [{"role": "user", "content": "Hi"}]}
        body |= {"choices": ["a", "b"], "tokens": [1, 2]}
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 50:
        body["max_tokens"] = 50  # what is only slow tells nothing
    try:
        return path, json.dumps(body).encode(), kind
    except ValueError:  # a whole number of 400 digits is too long for Python to write
        return path, b'{"prompt": 1' + b"0" * 400 + b"}", kind


def test_hostile_bodies_do_no_harm(live: Live) -> None:
    rng = random.Random(SEED)
    statuses: dict[int, int] = {}
    slowest, which, wrong = 0.0, b"", []
    with httpx.Client(base_url=live.url, timeout=60) as client:
        for i in range(COUNT):
            path, content, kind = hostile(rng)
            headers = {"Content-Type": kind} if kind else {}
            began = time.monotonic()
            reply = client.post(path, content=content, headers=headers)
            if time.monotonic() - began > slowest:
                slowest, which = time.monotonic() - began, content[:300]
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            shown = (i, path, content[:300], reply.text[:300])
            if reply.status_code >= 500:
                wrong.append(shown)
            elif reply.status_code != 200:
                error = reply.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, shown
                assert "Traceback" not in error["message"], shown
    print(statuses, f"slowest {slowest:.2f} s", which)
    assert wrong == []
    assert statuses.get(200, 0) > COUNT / 20, "some must be right, or nothing was tried"
    assert statuses.get(400, 0) > COUNT / 5
    assert live.idle()
    assert live.get("/readyz").status_code == 200


SCHEMATHESIS = """
import sys, schemathesis
from hypothesis import settings, HealthCheck, Phase
url, most = sys.argv[1], int(sys.argv[2])
schema = schemathesis.openapi.from_url(url + "/openapi.json")
from schemathesis.specs.openapi.checks import (content_type_conformance,
    response_schema_conformance, status_code_conformance)
from schemathesis.checks import not_a_server_error
checks = [not_a_server_error, status_code_conformance, content_type_conformance,
          response_schema_conformance]
count = 0
for result in schema.get_all_operations():
    operation = result.ok()
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        try:
            strategy = operation.as_strategy(generation_mode=mode)
        except Exception as error:
            continue
        from hypothesis import given
        @settings(max_examples=most, deadline=None, database=None, derandomize=True,
                  suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        @given(case=strategy)
        def test(case):
            global count
            if isinstance(case.body, dict):
                for name in ("max_tokens", "max_completion_tokens"):
                    if isinstance(case.body.get(name), int) and case.body[name] > 4:
                        case.body[name] = 4
                if isinstance(case.body.get("n"), int) and case.body["n"] > 2:
                    case.body["n"] = 2
                if "messages" in case.body and "max_tokens" not in case.body:
                    case.body["max_tokens"] = 3
            reply = case.call(timeout=60)
            count += 1
            case.validate_response(reply, checks=checks)
        try:
            test()
        except Exception as error:
            if type(error).__name__ in ("Unsatisfiable", "SkipTest"):
                continue
            raise
print("cases", count)
"""


def test_the_openapi_document_is_kept(live: Live) -> None:
    """schemathesis over the document: no 5xx, every reply of the documented form."""
    if importlib_missing("schemathesis"):
        pytest.skip("needs schemathesis: pip install schemathesis")
    most = os.environ.get("LMHEAD_SCHEMATHESIS", "5")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCHEMATHESIS, live.url, most],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert int(done.stdout.split()[-1]) > 50


def importlib_missing(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is None
