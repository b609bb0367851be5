"""Vectors in llama.cpp and in transformers: the same layer, the same logits, the same guard."""

from pathlib import Path

import pytest
import torch

from lmhead import SteeringVector, guard, steer_model
from lmhead.body.llama.library import is_installed
from lmhead.errors import UnsupportedModel
from lmhead.generation import generate
from lmhead.generation.api import events
from lmhead.loading import Model, load
from lmhead.sampling import SamplingParams
from lmhead.steer import load_control_vector, save_control_vector, steering_for
from tiny_gguf import gemma3, llama, merged_vocabulary, randomise, write_gguf

if not is_installed():
    pytest.skip(
        "llama-cpp-python is not installed; `make test-llamacpp` builds it", allow_module_level=True
    )

IDS = [5, 9, 13, 7, 22, 31, 8]
LAYERS = 6
Both = tuple[Model, Model]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """One float32 file, in transformers and in llama.cpp."""
    folder = tmp_path_factory.mktemp("steer")
    patch = pytest.MonkeyPatch()
    patch.setenv("LMHEAD_CACHE", str(folder / "cache"))
    make = {"llama": llama, "gemma3": gemma3}[request.param]
    net = randomise(make(num_hidden_layers=LAYERS))
    file = write_gguf(folder / "x.gguf", request.param, net, tokenizer=merged_vocabulary)
    found = load(file, body="torch"), load(file, body="llama.cpp")
    patch.undo()
    return found


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.head(model.last_hidden(IDS))


def vector(layer: int | str, size: float = 1.0) -> SteeringVector:
    v = torch.randn(64, generator=torch.Generator().manual_seed(7))
    return SteeringVector(v / v.norm(), layer, size)


@pytest.mark.parametrize("layer", [*range(1, LAYERS), "head"])
def test_a_layer_is_the_same_layer(layer: int | str, both: Both) -> None:
    """Block n of ours is block n of theirs: n - 1 and n + 1 give other logits, from both sides."""
    torch_model, llama_model = both
    v = vector(layer, 8.0)
    ours, theirs = (logits(steer_model(m, v)) for m in (torch_model, llama_model))
    assert float((ours - theirs).abs().max()) < 0.05
    assert float((logits(torch_model) - theirs).abs().max()) > 0.2
    if layer == "head":
        return
    for other in (int(layer) - 1, int(layer) + 1):
        if other >= LAYERS:
            continue
        beside = logits(steer_model(torch_model, vector(other, 8.0)))
        assert float((beside - theirs).abs().max()) > 0.1  # the next layer of transformers
        if other > 0:
            beside = logits(steer_model(llama_model, vector(other, 8.0)))
            assert float((beside - ours).abs().max()) > 0.1  # and of llama.cpp


def test_a_control_vector_file(both: Both, tmp_path: Path) -> None:
    vectors = [vector(1, 5.0), vector(3, 4.0)]
    path = save_control_vector(vectors, tmp_path / "v.gguf", "llama")
    ours, theirs = (logits(steer_model(m, load_control_vector(path))) for m in both)
    assert float((ours - theirs).abs().max()) < 0.05
    assert float((logits(both[0]) - ours).abs().max()) > 0.2


def test_block_0_is_refused(both: Both) -> None:
    with pytest.raises(UnsupportedModel, match=r"llama.cpp adds no vector at block 0"):
        logits(steer_model(both[1], vector(0)))


def test_unsteered_again_afterwards(both: Both) -> None:
    before = logits(both[1])
    logits(steer_model(both[1], vector(2, 20.0)))
    assert torch.equal(logits(both[1]), before)


@pytest.mark.parametrize("layer", [3, "head"])
def test_the_guard_runs_two_sequences(layer: int | str, both: Both) -> None:
    v = vector(layer, 30.0)
    params = SamplingParams(temperature=0.0)
    found = []
    for model in both:
        each = steering_for(model, v, kl_cap=0.05)
        reported = events([IDS], model, params=params, max_tokens=12, steering=each.alone)
        ids = [event.token for event in reported]
        guarded = guard(model, v, kl_cap=0.05)
        same = list(generate(IDS, guarded.model, max_tokens=12)[0].ids)
        assert same == ids
        assert guarded.log.max_kl <= 0.05 + 1e-6
        assert guarded.log.held_back > 0
        found.append((ids, guarded.log.strength[0]))
    assert found[0][0][0] == found[1][0][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=0.02)


def test_requests_with_other_vectors_side_by_side(both: Both) -> None:
    model = both[1]
    params = SamplingParams(temperature=0.0)
    wanted = []
    for layer in (1, 4):
        own = steering_for(model, vector(layer, 25.0))
        reported = events([IDS], model, params=params, max_tokens=8, steering=own.alone)
        wanted.append([event.token for event in reported])
    plain = list(generate(IDS, model, max_tokens=8)[0].ids)
    assert wanted[0] != wanted[1]
    each = iter([steering_for(model, vector(layer, 25.0)) for layer in (1, 4)])
    made: dict[int, list[int | None]] = {0: [], 1: []}
    for event in events(
        [IDS, IDS], model, params=params, max_tokens=8, steering=lambda: next(each)
    ):
        made[event.id].append(event.token)
    assert [made[0], made[1]] == wanted
    assert plain not in wanted
