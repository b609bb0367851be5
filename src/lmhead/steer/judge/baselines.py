"""What a detector must be compared with: simpler ways to tell true from false on the same split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.data import Row, Split
from lmhead.steer.learn.select import Known, candidates, choose_layer
from lmhead.steer.metrics import Interval, auroc, auroc_interval

SURFACE_SOLVES = 0.75  # from this AUROC on, the form of a text says most of what there is to say


@dataclass(frozen=True)
class Baseline:
    """One simpler detector: its AUROC on the test rows, and how many labels it has seen."""

    name: str
    auroc: Interval
    labels: int
    layer: int | str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        found = {"name": self.name, "labels": self.labels, "auroc": self.auroc.to_dict()}
        return found if self.layer is None else {**found, "layer": self.layer}


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


def score_baselines(parts: Split, states: Known, test: States, seed: int) -> list[Baseline]:
    """Score the test rows by every simpler way.

    `surface` is the better of the single features and of all together, with every label that is
    not of a test row: what the form of the text can tell at most.
    """
    y = torch.tensor([row.label for row in parts.test])
    seen = (*parts.labelled, *parts.unlabelled, *parts.validation)
    rows = [row for row in seen if row.label in (0, 1)]
    y_all = torch.tensor([row.label for row in rows])
    result = [
        Baseline("perplexity", auroc_interval(test.logprob, y, seed=seed), 0),
        Baseline("surface", _surface(rows, y_all, parts.test, y, seed), len(rows)),
    ]
    layers = candidates(test.last.shape[1] - 1)
    chosen = {m: choose_layer(states, m, layers, seed)[0] for m in ("mean-diff", "probe")}
    for method, layer in chosen.items():
        found = auroc_interval(states.fit(method, layer)(test.at(layer)), y, seed=seed)
        result.append(Baseline(method, found, len(parts.labelled), layer))
    layer = chosen["probe"]
    x = torch.cat([s.at(layer) for s in (states.labelled, states.unlabelled, states.validation)])
    every = linear.probe(x[[i for i, row in enumerate(seen) if row.label in (0, 1)]], y_all)
    found = auroc_interval(every(test.at(layer)), y, seed=seed)
    return [*result, Baseline("probe, all labels", found, len(rows), layer)]


def _surface(
    rows: Sequence[Row], y: Tensor, test: Sequence[Row], y_test: Tensor, seed: int
) -> Interval:
    x, x_test = surface(rows), surface(test)
    together = linear.probe(x, y, l2=1e-3)
    known = {"all": (auroc(together(x), y), together(x_test))}
    for j in range(x.shape[1]):
        a = auroc(x[:, j], y)  # on the training rows, which also say which way it points
        known[str(j)] = (max(a, 1 - a), x_test[:, j] if a >= 0.5 else -x_test[:, j])
    _, scores = max(known.values(), key=lambda found: found[0])
    return auroc_interval(scores, y_test, seed=seed)
