"""The separator vector: transport that keeps its shares, training that repeats and resumes."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmhead.body import TorchBody
from lmhead.errors import BadInput, LMHeadError
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.steer.bound.certificate import certify
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.learn.sinkhorn import most_confident, soft_labels
from lmhead.steer.learn.tsv import Fit, Settings, Texts, _Training, fit, largest_share, score
from lmhead.steer.metrics import auroc
from lmhead.steer.runs import Runs, frozen
from lmhead.steer.vector import HEAD

Tiny = Callable[[str], Model]
FEW = Settings(epochs=3, confident=4, learning_rate=0.05)


def test_sinkhorn_rows_are_distributions_and_shares_are_kept() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 2, generator=g).log_softmax(-1)
    shares = torch.tensor([0.3, 0.7])
    q = soft_labels(scores, shares, epsilon=0.5, iterations=50)
    torch.testing.assert_close(q.sum(1), torch.ones(200))
    torch.testing.assert_close(q.mean(0), shares, atol=1e-4, rtol=0)
    # Transport only shifts the scores by class: what is surer before is surer after.
    assert (q[:, 0].argsort() == (scores[:, 0] - scores[:, 1]).argsort()).float().mean() > 0.95
    extreme = soft_labels(torch.tensor([[0.0, -800.0], [-800.0, 0.0]]), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(extreme, torch.eye(2))


def test_the_surest_join_by_class() -> None:
    q = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.1, 0.9], [0.3, 0.7]])
    assert most_confident(q, torch.tensor([0.5, 0.5]), 2).tolist() == [0, 3]
    assert most_confident(q, torch.tensor([0.5, 0.5]), 4).tolist() == [0, 2, 3, 4]
    assert most_confident(q, torch.tensor([1.0, 0.0]), 2).tolist() == [0, 2]


def test_score_prefers_the_nearer_prototype() -> None:
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    log_p = score(torch.tensor([[5.0, 1.0], [1.0, 2.0]]), prototypes)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(2))
    assert (log_p[:, 0] > log_p[:, 1]).tolist() == [True, False]


def texts(model: Model, layer: int | str, n: int, seed: int) -> Texts:
    """Random words; the true ones end in `ee`, the false ones in `oo`."""
    g = torch.Generator().manual_seed(seed)
    words, y = [], torch.arange(n) % 2
    for label in y.tolist():
        letters = [chr(97 + int(i)) for i in torch.randint(0, 26, (8,), generator=g)]
        word = "".join(letters).replace("e", "a")
        words.append(word + ("ee" if label else "oo") + ".")
    return Texts(Runs.read(model, words, layer), y)


def train(
    model: Model,
    layer: int | str = 1,
    settings: Settings = FEW,
    constraints: Constraints = Constraints(),  # noqa: B008
    seed: int = 0,
    checkpoint: Path | None = None,
    reported: list[dict[str, float]] | None = None,
) -> Fit:
    with frozen(model):
        return fit(
            model.head,
            texts(model, layer, 12, 0),
            texts(model, layer, 16, 1),
            texts(model, layer, 10, 2),
            settings=settings,
            constraints=constraints,
            seed=seed,
            checkpoint=checkpoint,
            report=None if reported is None else reported.append,
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_lowers_the_loss_and_separates(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    labelled = texts(model, 1, 12, 0)
    with frozen(model):
        found = fit(model.head, labelled, settings=Settings(epochs=15, learning_rate=0.02))
    assert (found.epoch, found.auroc) == (15, None)
    assert found.history[-1]["loss"] < 0.9 * found.history[0]["loss"]
    scores = score(labelled.runs.last(5.0 * found.direction), found.prototypes)[:, 0]
    assert auroc(scores, labelled.y) > 0.9


@pytest.mark.parametrize("layer", [1, HEAD])
def test_a_model_in_bfloat16_can_be_trained_on(tiny: Tiny, layer: int | str) -> None:
    """Its states met float32 prototypes in one product, which torch refuses."""
    net = copy.deepcopy(tiny("llama").body.model).to(torch.bfloat16)
    model = replace(tiny("llama"), body=TorchBody(net), head=LMHead.from_model(net))
    found = train(model, layer, constraints=Constraints(kl=0.1))
    assert found.direction.dtype == torch.float32
    assert bool(found.direction.isfinite().all())
    assert float(found.direction.norm()) > 0


def test_the_epoch_is_chosen_on_the_validation_rows(tiny: Tiny) -> None:
    reported: list[dict[str, float]] = []
    found = train(tiny("llama"), reported=reported)
    assert {"epoch", "loss", "max_delta", "max_kl"} == reported[0].keys()
    seen = {step["epoch"]: step["auroc"] for step in reported if "auroc" in step}
    assert list(seen) == [2, 3, 4, 6]  # every second one, and the last of each stage
    assert found.auroc == max(seen.values())
    assert found.epoch == min(epoch for epoch, value in seen.items() if value == found.auroc)
    held = texts(tiny("llama"), 1, 10, 2)
    scores = score(held.runs.last(5.0 * found.direction), found.prototypes)[:, 0]
    assert auroc(scores, held.y) == pytest.approx(found.auroc, abs=1e-6)
    assert train(tiny("llama"), settings=replace(FEW, last=True)).epoch == 6


def test_a_start_that_misleads_is_not_begun_from(tiny: Tiny) -> None:
    """Only where the validation rows rank the class means below chance do random ones begin."""
    model = tiny("llama")
    labelled = texts(model, 1, 12, 0)
    still = Settings(epochs=1, learning_rate=1e-12)  # it hardly leaves where it began
    to_the_letter = fit(model.head, labelled, settings=replace(still, as_published=True)).prototypes
    means = fit(model.head, labelled, settings=still).prototypes
    assert not torch.allclose(means, to_the_letter, atol=0.1)
    turned_round = Texts(labelled.runs, 1 - labelled.y)
    for validation, expected in ((labelled, means), (turned_round, to_the_letter)):
        begun = fit(model.head, labelled, None, validation, settings=still).prototypes
        torch.testing.assert_close(begun, expected)


def test_the_same_seed_gives_the_same_vector(tiny: Tiny) -> None:
    model = tiny("llama")
    first, again, other = train(model), train(model), train(model, seed=1)
    assert torch.equal(first.direction, again.direction)
    assert torch.equal(first.prototypes, again.prototypes)
    assert not torch.equal(first.direction, other.direction) or first.history != other.history


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_killed_training_goes_on_to_the_same_vector(
    tiny: Tiny, tmp_path: Path, after: int
) -> None:
    model = tiny("llama")
    constraints = Constraints(kl=0.1)
    whole = train(model, constraints=constraints)
    path = tmp_path / "state"

    class Dying(list[dict[str, float]]):
        def append(self, reported: dict[str, float]) -> None:
            if reported["epoch"] == after:
                raise Killed

    with pytest.raises(Killed):
        train(model, constraints=constraints, checkpoint=path, reported=Dying())
    reported: list[dict[str, float]] = []
    resumed = train(model, constraints=constraints, checkpoint=path, reported=reported)
    assert [step["epoch"] for step in reported] == list(range(after + 1, 7))
    assert torch.equal(resumed.direction, whole.direction)
    assert torch.equal(resumed.prototypes, whole.prototypes)
    assert resumed.history == whole.history


def test_another_training_does_not_go_on_from_it(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    train(model, checkpoint=tmp_path / "state")
    with pytest.raises(LMHeadError, match="another training"):
        train(model, seed=1, checkpoint=tmp_path / "state")
    (tmp_path / "broken").write_bytes(b"no state")
    with pytest.raises(LMHeadError, match="not a training state"):
        train(model, checkpoint=tmp_path / "broken")
    for said in ("[]", "{}", '{"key": "", "history": 5}', '{"key": "", "history": [], "x": 1}'):
        save_file({"v": torch.zeros(2)}, tmp_path / "broken", {"state": said})
        with pytest.raises(LMHeadError, match="not a training state"):
            train(model, checkpoint=tmp_path / "broken")


def test_a_budget_at_the_head_is_certified_at_every_epoch(tiny: Tiny) -> None:
    model = tiny("llama")
    free = train(model, layer="head", settings=Settings(epochs=6, learning_rate=0.2))
    held = train(
        model,
        layer="head",
        settings=Settings(epochs=6, learning_rate=0.2),
        constraints=Constraints(budget=2.0),
    )
    assert certify(model.head, free.direction, 5.0).range > 4
    assert certify(model.head, held.direction, 5.0).range <= 2.0
    assert certify(model.head, held.direction, 5.0).range > 0.5


def test_a_budget_at_a_block_is_kept_on_the_calibration_texts(tiny: Tiny) -> None:
    model = tiny("llama")
    reported: list[dict[str, float]] = []
    train(model, constraints=Constraints(budget=1.0), reported=reported)
    assert max(step["max_delta"] for step in reported) <= 1.0
    free: list[dict[str, float]] = []
    train(model, reported=free)
    assert max(step["max_delta"] for step in free) > 1.0


def test_kl_at_the_true_output_lowers_the_harm(tiny: Tiny) -> None:
    model = tiny("llama")
    free: list[dict[str, float]] = []
    held: list[dict[str, float]] = []
    train(model, reported=free)
    train(model, constraints=Constraints(kl=10.0), reported=held)
    assert held[-1]["max_kl"] < 0.5 * free[-1]["max_kl"]


def test_to_the_letter_loses_soft_labels_and_starts_at_random(tiny: Tiny) -> None:
    model = tiny("llama")
    letter = train(model, settings=Settings(epochs=2, confident=4, as_published=True))
    ours = train(model, settings=Settings(epochs=2, confident=4))
    assert not torch.equal(letter.direction, ours.direction)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan")])
def test_strengths_that_are_none(alpha: float) -> None:
    with pytest.raises(BadInput, match="alpha is"):
        Settings(alpha=alpha)


def test_the_largest_share_ends_whatever_is_measured() -> None:
    assert largest_share(lambda share: share, 2.0, 4) == 1.0
    assert 0.25 - 1 / 64 <= largest_share(lambda share: share, 0.25, 6) <= 0.25
    assert largest_share(lambda share: share, 1e-9, 4) <= 1e-9
    with pytest.raises(BadInput, match="not numbers"):
        largest_share(lambda _share: math.nan, 1.0, 4)
    with pytest.raises(BadInput, match="not numbers"):
        largest_share(lambda share: 3.0 if share == 1 else math.nan, 1.0, 4)
    with pytest.raises(BadInput, match="raise the budget"):
        largest_share(lambda _share: 3.0, 1.0, 4)


def test_the_step_is_that_of_torch(tiny: Tiny) -> None:
    """The vector is what AdamW gives that is kept alive, for steps with pauses in between."""
    model = tiny("llama")
    texts = Texts(Runs.read(model, ["a b", "c d"], HEAD), torch.tensor([1, 0]))
    training = _Training(model.head, texts, Settings(), Constraints(), None, 0)
    state = training.start(None)
    v = torch.zeros(24)
    optimiser = torch.optim.AdamW([v], lr=5e-3)
    g = torch.Generator().manual_seed(0)
    for _ in range(7):
        gradient = torch.randn(24, generator=g)
        training._step(state, gradient.clone())
        v.grad = gradient
        optimiser.step()
        assert torch.equal(state.v, v)
