"""What every body does, held to one suite: prefill, step, select, join, leave, add by rows.

Each body runs the same tiny random model, written once as a GGUF file in float32; the oracle is
transformers with one sequence and no batch. A body that is not installed is skipped.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead.body import HEAD, Body
from lmhead.body.llama.library import is_installed
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.loading import Model, load
from tiny_gguf import ARCHITECTURES, merged_vocabulary, randomise, write_gguf

PROMPTS = ([5, 9, 13, 7, 22, 31, 8, 40, 17], [11, 6, 19], [3, 44, 27, 60, 2])
NEXT = torch.randint(4, 90, (12, 3), generator=torch.Generator().manual_seed(0))
FAMILIES = ("llama", "gemma3", "gpt2", "qwen2", "qwen3")
Load = Callable[[str, str], Model]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that loads the model of a family with one of the bodies."""
    folder = tmp_path_factory.mktemp("gguf")
    patch = pytest.MonkeyPatch()
    patch.setenv("LMHEAD_CACHE", str(folder / "cache"))
    files: dict[str, Path] = {}
    found: dict[tuple[str, str], Model] = {}

    def get(family: str, body: str) -> Model:
        if body == "llama.cpp" and not is_installed():
            pytest.skip("llama-cpp-python is not installed; `make test-llamacpp` builds it")
        if family not in files:
            tied = family != "qwen3"  # one whose embedding is not its head
            net = randomise(ARCHITECTURES[family](tie_word_embeddings=tied))
            files[family] = write_gguf(
                folder / f"{family}.gguf", family, net, tokenizer=merged_vocabulary
            )
        if (family, body) not in found:
            found[family, body] = load(files[family], body=body)
        return found[family, body]

    yield get
    patch.undo()


@pytest.fixture(params=["torch", "llama.cpp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def oracle(loaded: Load, family: str, row: int, steps: int = 12) -> list[Tensor]:
    """What h `[d]` is after a prompt, and after each token that follows, read from scratch."""
    body = loaded(family, "torch").body
    ids = [*PROMPTS[row], *NEXT[:steps, row].tolist()]
    with torch.no_grad():
        h, _ = body(torch.tensor([ids]), use_cache=False)
    return list(h[0, len(PROMPTS[row]) - 1 :])


def close(h: Tensor, expected: Tensor) -> None:
    off = (h.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(off.max()) < 2e-3, f"h is off by {float(off.max()):.2g} of its size"


def step(body: Body, memory: Any, rows: Sequence[int], at: int) -> tuple[Tensor, Any]:
    with torch.inference_mode():
        h, memory = body.run(NEXT[at, list(rows)].unsqueeze(1), memory)
    return h[:, -1], memory


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_of_a_batch(family: str, kind: str, loaded: Load) -> None:
    body = loaded(family, kind).body
    ids = torch.stack([torch.tensor([*p, *[0] * (9 - len(p))]) for p in PROMPTS])  # padded behind
    with torch.inference_mode():
        h, _ = body(ids, use_cache=False)
    assert h.shape == (3, 9, loaded(family, kind).head.hidden_size)
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected, _ = loaded(family, "torch").body(torch.tensor([prompt]), use_cache=False)
        close(h[row, : len(prompt)], expected[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_several_lengths_and_steps(family: str, kind: str, loaded: Load) -> None:
    body = loaded(family, kind).body
    expected = [oracle(loaded, family, row) for row in range(3)]
    with torch.inference_mode():
        h, memory = body.prefill(PROMPTS)
    close(h, torch.stack([e[0] for e in expected]))
    for at in range(12):
        h, memory = step(body, memory, range(3), at)
        close(h, torch.stack([e[at + 1] for e in expected]))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_leave_change_places_and_are_copied(family: str, kind: str, loaded: Load) -> None:
    body = loaded(family, kind).body
    expected = [oracle(loaded, family, row) for row in range(3)]
    with torch.inference_mode():
        _, memory = body.prefill(PROMPTS)
        memory.select([2, 0])
    h, memory = step(body, memory, [2, 0], 0)
    close(h, torch.stack([expected[2][1], expected[0][1]]))
    memory.select([1, 0, 1])
    h, memory = step(body, memory, [0, 2, 0], 1)
    close(h, torch.stack([expected[0][2], expected[2][2], expected[0][2]]))
    # the copies go apart
    with torch.inference_mode():
        other, memory = body.run(torch.tensor([[77], [int(NEXT[2, 2])], [int(NEXT[2, 0])]]), memory)
    close(other[1:, -1], torch.stack([expected[2][3], expected[0][3]]))
    assert (other[0, -1] - other[2, -1]).norm() > 0.05 * other[2, -1].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_join_and_leave(family: str, kind: str, loaded: Load) -> None:
    body = loaded(family, kind).body
    expected = [oracle(loaded, family, row) for row in range(3)]
    with torch.inference_mode():
        _, memory = body.prefill([PROMPTS[0]])
    _, memory = step(body, memory, [0], 0)
    with torch.inference_mode():
        h, late = body.prefill([PROMPTS[1], PROMPTS[2]])
        memory.join(late)
    close(h, torch.stack([expected[1][0], expected[2][0]]))
    # row 0 is a step ahead of those that joined
    with torch.inference_mode():
        ids = torch.stack([NEXT[1, 0], NEXT[0, 1], NEXT[0, 2]]).unsqueeze(1)
        h, memory = body.run(ids, memory)
    close(h[:, -1], torch.stack([expected[0][2], expected[1][1], expected[2][1]]))
    memory.select([0, 2])  # one is cancelled
    with torch.inference_mode():
        ids = torch.stack([NEXT[2, 0], NEXT[1, 2]]).unsqueeze(1)
        h, memory = body.run(ids, memory)
    close(h[:, -1], torch.stack([expected[0][3], expected[2][2]]))


@pytest.mark.parametrize("layer", [1, HEAD])
def test_what_is_added_to_a_row_reaches_no_other(layer: int | str, kind: str, loaded: Load) -> None:
    body, reference = loaded("llama", kind).body, loaded("llama", "torch").body
    v = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 3
    with torch.inference_mode():
        plain, _ = body.prefill(PROMPTS)
        h, memory = body.prefill(PROMPTS, rows=[None, {layer: v}, None])
        wanted, theirs = reference.prefill([PROMPTS[1]], rows=[{layer: v}])
    close(h[1:2], wanted)
    assert (h[1] - plain[1]).norm() > 0.05 * plain[1].norm()
    close(h[[0, 2]], plain[[0, 2]])
    with torch.inference_mode():
        h, memory = body.run(NEXT[0].unsqueeze(1), memory, rows=[None, {layer: v}, None])
        wanted, _ = reference.run(NEXT[0, 1:2].unsqueeze(1), theirs, rows=[{layer: v}])
    close(h[1:2], wanted)


def test_a_layer_that_is_not_there(kind: str, loaded: Load) -> None:
    body = loaded("llama", kind).body
    with pytest.raises(BadInput, match=r"the layer is 2, but the model has 2 blocks"):
        body.prefill([PROMPTS[0]], rows=[{2: torch.zeros(64)}])


def test_a_memory_of_another_body_is_refused(loaded: Load) -> None:
    _, ours = loaded("llama", "llama.cpp").body.prefill([PROMPTS[0]])
    _, theirs = loaded("gpt2", "llama.cpp").body.prefill([PROMPTS[0]])
    with pytest.raises(UnsupportedModel, match="expected two memories of one model"):
        ours.join(theirs)
