"""The llama.cpp body on a real file: against transformers, under the engine, and when it fails."""

import gc
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.body.llama import library as room
from lmhead.body.llama.library import Loaded, is_installed, library
from lmhead.body.llama_cpp import LlamaBody
from lmhead.errors import BadInput, LMHeadError, UnsupportedModel
from lmhead.generation import Engine, Generation, Request, generate, next_tokens, score_text
from lmhead.generation.engines import engine
from lmhead.loading import Model, load
from lmhead.sampling import Sampler, SamplingParams
from tiny_gguf import ARCHITECTURES, Q, llama, merged_vocabulary, randomise, write_gguf

if not is_installed():
    if os.environ.get("LMHEAD_LLAMACPP"):
        pytest.fail("llama-cpp-python is not installed", pytrace=False)
    pytest.skip(
        "llama-cpp-python is not installed; `make test-llamacpp` builds it", allow_module_level=True
    )

pytestmark = pytest.mark.model

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "To bake a good bread you need flour, water, salt and",
    "In 1969 the first men landed on",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "The three primary colours are",
)
WORDS = ("the", "of", "and", "to", "in", "is", "was", "he", "for", "it", "with", "as", "his", "on")
# Of h, which 8-bit rounding of the states inside llama.cpp's products changes; in float32 it is 1.
COSINE = 0.998
CONTROLS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
)


@pytest.fixture(scope="module")
def fast(smollm2: Path) -> Model:
    return load("smollm2-135m", body="llama.cpp")


@pytest.fixture(scope="module")
def slow(smollm2: Path) -> Model:
    return load("smollm2-135m", body="torch")


def rss() -> int:
    """Return the bytes of this process that are in memory and no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not tell how much memory a process has")


def test_it_is_a_body_of_the_file_and_computes_no_head(fast: Model, slow: Model) -> None:
    assert isinstance(fast.body, LlamaBody)
    assert not fast.body.own_head
    assert fast.head.sha256 == slow.head.sha256
    assert (fast.body.vocab_size, fast.body.context) == (slow.body.vocab_size, slow.body.context)
    assert fast.stop_ids == slow.stop_ids


def test_h_is_that_of_transformers_up_to_8_bits(fast: Model, slow: Model) -> None:
    for text in TEXTS:
        h, wanted = fast.last_hidden(text), slow.last_hidden(text)
        assert float(torch.cosine_similarity(h, wanted, dim=0)) > COSINE
    best = next_tokens(TEXTS[0], fast, top=3).tokens
    assert best[0].token == " Paris"


def test_greedy_texts_part_only_at_near_ties(fast: Model, slow: Model) -> None:
    """Where they part, the two tokens score closer than the two bodies' logits differ."""
    for text in TEXTS[:3]:
        ours, theirs = (generate(text, m, max_tokens=24)[0].ids for m in (fast, slow))
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            continue
        ids = [*slow.encode(text), *theirs[:at]]
        with torch.no_grad():
            y, z = fast.head(fast.last_hidden(ids)), slow.head(slow.last_hidden(ids))
        two = [ours[at], theirs[at]]
        assert float(z[two].max() - z[two].min()) <= 2 * float((y - z)[two].abs().max())


def test_scores_are_close(fast: Model, slow: Model) -> None:
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    ours, theirs = (score_text(text, m)[0].logprob for m in (fast, slow))
    assert ours == pytest.approx(theirs, abs=0.05 * abs(theirs))


def test_the_screened_head_gives_the_same_ids(fast: Model) -> None:
    dense = generate(list(TEXTS), fast, max_tokens=12)
    screened = generate(list(TEXTS), fast, max_tokens=12, head=engine(fast, "screened"))
    assert [r.ids for r in screened] == [r.ids for r in dense]


def sampler(model: Model, **controls: Any) -> Sampler:
    params = SamplingParams(**{"temperature": 0.0, **controls})
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids))
    return Sampler.from_params(params, vocab_size=model.reachable, tokenizer=model.tokenizer)


def test_forty_requests_join_and_leave(fast: Model) -> None:
    """Each gives what it gives alone, to the bit: no sum depends on who runs beside it."""
    rng = random.Random(40)
    requests = [
        Request(
            fast.encode(" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))),
            sampler(fast, **rng.choice(CONTROLS), seed=seed),
            max_tokens=rng.randint(2, 14),
        )
        for seed in range(40)
    ]
    expected = [_alone(fast, request) for request in requests]
    running = Engine(fast, batch_size=8)
    place, found, cancelled = {}, {}, set()
    todo = list(range(40))
    while todo or running.busy:
        while todo and (rng.random() < 0.4 or not running.busy):
            i = todo.pop(0)
            place[running.submit(requests[i])] = i
        for id_, i in place.items():
            if i % 10 == 9 and i not in found and i not in cancelled and rng.random() < 0.3:
                assert running.cancel(id_)
                cancelled.add(i)
        for event in running.step():
            if event.result is not None:
                found[place[event.id]] = event.result
    assert len(found) >= 36
    for i, result in found.items():
        assert result.ids == expected[i].ids


def _alone(model: Model, request: Request) -> Generation:
    one = Engine(model)
    one.submit(request)
    return next(event.result for event in one.run() if event.result)


def test_generations_leave_nothing_behind(fast: Model) -> None:
    """`LMHEAD_MANY=2000` runs the full number."""
    assert isinstance(fast.body, LlamaBody)
    many = int(os.environ.get("LMHEAD_MANY", "60"))
    prompts = [fast.encode(text) for text in TEXTS]
    before = 0
    for i in range(many + 20):
        generate(prompts[i % len(prompts)], fast, max_tokens=3)
        if i == 20:
            gc.collect()
            before = rss()
    gc.collect()
    assert rss() - before < 4e6
    rows = fast.body._rows
    rows._collect()
    assert len(rows._free) == rows.context.sequences
    assert not rows._used


def test_the_memory_grows_and_keeps_what_it_holds(smollm2_gguf: Path) -> None:
    """In cells, when a text is long, and in rows, when many come; nobody's h changes by a bit."""
    model = load("smollm2-135m", body="llama.cpp")
    assert isinstance(model.body, LlamaBody)
    prompt = model.encode("The capital of France is")
    ids = torch.tensor([[260], [7042]])
    with torch.inference_mode():
        _, memory = model.body.prefill([prompt, prompt[:3]])
        wanted, memory = model.body.run(ids, memory)
        further, _ = model.body.run(ids, memory)
        _, memory = model.body.prefill([prompt, prompt[:3]])
        first = model.body._rows.context
        _, _long = model.body.prefill([[7] * (first.cells + 4)])
        grown = model.body._rows.context
        assert grown.cells == 2 * first.cells
        h, memory = model.body.run(ids, memory)
        assert torch.equal(h, wanted)
        _, _many = model.body.prefill([[5 + i] for i in range(2 * grown.sequences)])
        last = model.body._rows.context
        assert (last.cells, last.sequences > 2 * grown.sequences) == (grown.cells, True)
        h, _ = model.body.run(ids, memory)
    assert torch.equal(h, further)


@pytest.mark.parametrize(("family", "rounding"), [("llama", 0.0), ("gemma3", 1e-5)])
def test_a_copy_is_a_copy_although_the_memory_grows_at_once(
    family: str, rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's own copy is done at the next pass, and would be lost with the old context.

    What has left a sliding window is not copied: the same is added up in another order.
    """
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    net = randomise(ARCHITECTURES[family](max_position_embeddings=2000))
    file = write_gguf(tmp_path / "x.gguf", family, net, tokenizer=merged_vocabulary)
    body = load(file, body="llama.cpp").body
    assert isinstance(body, LlamaBody)
    ids = torch.randint(4, 90, (1, body._rows.context.cells), generator=torch.manual_seed(0))
    nexts = torch.tensor([[9], [9], [11]])
    with torch.inference_mode():
        wanted, _ = load(file, body="torch").body(torch.cat([ids, nexts[:1]], 1), use_cache=False)
        _, memory = body.run(ids)
        memory.select([0, 0, 0])  # more rows than there are
        h, memory = body.run(nexts, memory)  # and more cells
        assert off(h[0], h[1]) <= rounding
        assert off(h[0], h[2]) > 0.01
        assert off(h[0, -1], wanted[0, -1]) < 2e-3
        memory.select([2, 2])
        h, _ = body.run(nexts[:2], memory)
    assert off(h[0], h[1]) <= rounding


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_many_texts_are_read_a_few_at_a_time(fast: Model) -> None:
    assert isinstance(fast.body, LlamaBody)
    texts = [f"{word} {other}" for word in WORDS for other in WORDS[:3]]
    h = fast.last_hidden(texts)
    assert h.shape == (42, fast.head.hidden_size)
    assert torch.equal(h[17], fast.last_hidden(texts[17]))
    rows = fast.body._rows
    rows._collect()
    assert not rows._used


def test_too_many_sequences(fast: Model) -> None:
    assert isinstance(fast.body, LlamaBody)
    with pytest.raises(BadInput, match=r"remembers at most \d+; lower batch_size"):
        fast.body.prefill([[5]] * 1000)
    h, _ = fast.body.prefill([[5]] * 3)  # and goes on
    assert h.shape[0] == 3


def test_it_runs_on_as_many_threads_as_torch(fast: Model) -> None:
    assert isinstance(fast.body, LlamaBody)
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            fast.last_hidden("x")
            assert fast.body._rows.context._threads == threads
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_file_that_llama_cpp_cannot_load_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UnsupportedModel, match=rf"llama.cpp cannot load {path}.*body='torch'"):
        Loaded(path)


def test_another_version_is_met_by_a_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(library(), "llama_memory_seq_rm")
    room.library.cache_clear()
    try:
        with pytest.raises(LMHeadError, match=r"llama-cpp-python .* has no llama_memory_seq_rm"):
            library()
    finally:
        monkeypatch.undo()
        room.library.cache_clear()
        library()


def test_what_it_cannot_be_given(fast: Model) -> None:
    with pytest.raises(BadInput, match=r"attention_mask cannot be given to llama\.cpp"):
        fast.body(torch.tensor([[1]]), attention_mask=torch.ones(1, 1))
    with pytest.raises(BadInput, match="expected numbers from 0 to 49,151"):
        fast.body(torch.tensor([[49_152]]))
    with pytest.raises(BadInput, match=r"which runs \.gguf files"):
        load("gpt2", body="llama.cpp")
    with pytest.raises(BadInput, match="the file as it is stored on the CPU"):
        load("smollm2-135m", body="llama.cpp", dtype="float32")
    with pytest.raises(BadInput, match="with another body"):
        load(fast, body="torch")
    assert load(fast, body="llama.cpp") is fast
    assert load(fast, body="auto") is fast


def test_auto_takes_it_for_a_gguf_file_alone(
    smollm2_gguf: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    file = write_gguf(
        tmp_path / "tiny.gguf", "llama", randomise(llama()), Q.Q8_0, tokenizer=merged_vocabulary
    )
    made = load(file, body="auto")
    assert isinstance(made.body, LlamaBody)
    kept = {path.name for path in (tmp_path / "cache").iterdir()} - {"locks", "staging"}
    assert kept == {"heads", "bodies", "sources"}  # and not the blocks in float32
    assert not isinstance(load(file).body, LlamaBody)
    assert not isinstance(load(file, body="auto", dtype="float32").body, LlamaBody)
    assert not isinstance(load(smollm2, body="auto").body, LlamaBody)


@pytest.mark.parametrize("command", ["next", "read", "score", "generate"])
def test_the_command_line_says_which_body_it_takes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {**os.environ, "LMHEAD_CACHE": str(tmp_path / "cache")}
    file = write_gguf(
        tmp_path / "tiny.gguf", "llama", randomise(llama()), tokenizer=merged_vocabulary
    )
    said = {}
    for body in ("auto", "torch"):
        done = subprocess.run(
            [sys.executable, "-m", "lmhead", command, "abc", "-m", str(file), "--body", body],
            capture_output=True, text=True, env=env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said[body] = done
    assert "body: llama.cpp" in said["auto"].stderr
    assert "llama.cpp" not in said["torch"].stderr
    assert said["auto"].stdout == said["torch"].stdout  # in float32 they agree to every digit shown


def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    env = {**os.environ, "LMHEAD_CACHE": str(tmp_path / "cache")}
    file = write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        randomise(llama(max_position_embeddings=4000)),
        tokenizer=merged_vocabulary,
    )
    command = [sys.executable, "-m", "lmhead", "generate", "abc", "-m", str(file), "-n", "3000"]
    command += ["--body", "llama.cpp", "--min-tokens", "3000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as it:
        assert it.stdout is not None
        it.stdout.read(12)  # it generates
        it.send_signal(signal.SIGKILL)
    done = subprocess.run([*command[:8], "5", *command[9:11]], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "cache" / "staging").iterdir())
    bodies = list((tmp_path / "cache" / "bodies").iterdir())
    assert [sorted(p.name for p in b.iterdir()) for b in bodies] == [["blocks.gguf", "lmhead.json"]]
