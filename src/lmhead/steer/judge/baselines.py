"""What a detector must be compared with: simpler ways to tell true from false on the same split.

And a control: the same training on labels that were dealt out by chance. What it finds above 0.5 is
found without any label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.body.likelihood import LAST
from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.blending import likelihood_fit
from lmhead.steer.learn.data import Row, Split
from lmhead.steer.learn.select import Known, candidates, choose_layer
from lmhead.steer.metrics import Interval, auroc, auroc_gain, auroc_interval

SHUFFLES = 5
LAST_TOKENS, SURFACE, SHUFFLED = "last tokens", "surface", "shuffled labels"


@dataclass(frozen=True)
class Baseline:
    """One simpler detector: its AUROC on the test rows, and how many labels it has seen.

    `gain` is how much more the detector itself has, paired: on the same rows.
    """

    name: str
    auroc: Interval
    gain: Interval
    labels: int
    layer: int | str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        found = {
            "name": self.name,
            "labels": self.labels,
            "auroc": self.auroc.to_dict(),
            "gain": self.gain.to_dict(),
        }
        return found if self.layer is None else {**found, "layer": self.layer}


class Scored(NamedTuple):
    """Scores of the test rows, `[N]`, before they are judged."""

    name: str
    scores: Tensor
    labels: int
    layer: int | str | None = None

    def judged(self, detector: Tensor, y: Tensor, seed: int) -> Baseline:
        """Compare with the detector's own scores."""
        found = auroc_interval(self.scores, y, seed=seed)
        gain = auroc_gain(detector, self.scores, y, seed=seed)
        return Baseline(self.name, found, gain, self.labels, self.layer)


def surface(rows: Sequence[Row]) -> Tensor:
    """Return what is seen of a text without reading it, `[N, 8]`."""
    found = []
    for row in rows:
        text = row.text[len(row.prompt) :]
        words = text.split()
        found.append(
            [
                len(text),
                len(words),
                len(text) / max(1, len(words)),
                float(text.rstrip(".")[-1:].isdigit()),
                float(text.endswith(".")),
                sum(c in ",;:" for c in text),
                sum(c.isupper() for c in text),
                sum(w.lower().strip(".,") in _NEGATIONS for w in words),
            ]
        )
    return torch.tensor(found, dtype=torch.float32)


_NEGATIONS = {"no", "not", "none", "nothing", "never", "cannot", "nobody", "without"}


def score_baselines(parts: Split, states: Known, test: States, seed: int) -> list[Scored]:
    """Score the test rows by every simpler way.

    - `last tokens`: the log-probability of the last three before the stop; no label.
    - `perplexity`: the mean log-probability of all tokens; no label.
    - `likelihood`: all figures of likelihood, by the same labels as the detector.
    - `surface`: the better of the single features and of all together, with every label that is
      not of a test row: what the form of the text can tell at most.
    - `mean-diff`, `probe`: at the layer that the folds choose, by the same labels.
    - `probe, all labels`: with every label that is not of a test row; no rival but a measure.
    """
    seen = (*parts.labelled, *parts.validation, *parts.unlabelled)
    rows = [row for row in seen if row.label in (0, 1)]
    y_all = torch.tensor([row.label for row in rows])
    labels = len(states.y)
    figured = likelihood_fit(states)
    result = [
        Scored(LAST_TOKENS, test.likelihood[:, LAST], 0),
        Scored("perplexity", test.logprob, 0),
        Scored("likelihood", figured(test.likelihood), labels),
        Scored(SURFACE, _surface(rows, y_all, parts.test), len(rows)),
    ]
    layers = candidates(test.last.shape[1] - 1)
    chosen = {m: choose_layer(states, m, layers, seed)[0] for m in ("mean-diff", "probe")}
    for method, layer in chosen.items():
        scores = states.fit(method, layer)(test.at(layer))
        result.append(Scored(method, scores, labels, layer))
    layer = chosen["probe"]
    x = torch.cat([states.labelled.at(layer), states.unlabelled.at(layer)])
    every = linear.probe(x[[i for i, row in enumerate(seen) if row.label in (0, 1)]], y_all)
    return [*result, Scored("probe, all labels", every(test.at(layer)), len(rows), layer)]


def shuffled(
    states: Known, test: States, seed: int, train: Callable[[Known], Callable[[States], Tensor]]
) -> Scored:
    """Score the test rows by the same training on labels dealt out anew; the mean of some deals.

    Scores are ranked before they are averaged, so that every deal counts the same.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(test))
    for _ in range(SHUFFLES):
        y = states.y[torch.randperm(len(states.y), generator=generator)]
        total += train(replace(states, y=y))(test).argsort().argsort() / len(test)
    return Scored(SHUFFLED, total, len(states.y))


def _surface(rows: Sequence[Row], y: Tensor, test: Sequence[Row]) -> Tensor:
    x, x_test = surface(rows), surface(test)
    together = linear.probe(x, y, l2=1e-3)
    known = {"all": (auroc(together(x), y), together(x_test))}
    for j in range(x.shape[1]):
        a = auroc(x[:, j], y)  # on the training rows, which also say which way it points
        known[str(j)] = (max(a, 1 - a), x_test[:, j] if a >= 0.5 else -x_test[:, j])
    _, scores = max(known.values(), key=lambda found: found[0])
    return scores
