"""What `auto` detects by: states of several layers and the likelihood of the text, as one score.

Symbols: N labelled rows, M rows in all, F figures of likelihood, k principal components.

Two opinions, each a ridge-logistic model fitted on all labels:
- likelihood: the F figures, standardised. Its prior is the one figure that needs no label, the
  log-probability of the last tokens: with few labels that is what it says, and no worse.
- states: the first k principal components, found on all rows, of some layers, weighed.
Out-of-fold scores of all labels say how much each counts; nothing is spent on a validation split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.body.likelihood import FIGURES, LAST
from lmhead.steer.learn.folding import folds, out_of_fold
from lmhead.steer.learn.linear import Linear
from lmhead.steer.learn.ridge import ridge_logistic
from lmhead.steer.learn.select import Known
from lmhead.steer.metrics import auroc

LAYERS = 8  # that are read, evenly spaced
COMPONENTS = 24
# Ridges are of the sum over rows, as a prior is: more labels overrule it.
LIKELIHOOD_RIDGE, STATES_RIDGE, WEIGHTS_RIDGE = 64.0, 4.0, 8.0
TEMPER = 0.25  # of the layers' likelihoods: their errors are not independent
PRIOR = 0.35  # logits for one standard deviation of the last tokens' log-probability
LIKELIHOOD, STATES = "likelihood", "states"


@dataclass(frozen=True)
class Blend:
    """Linear detectors of several layers and weights of the figures, as one score."""

    terms: dict[int | str, Linear]  # by layer
    likelihood: Tensor  # [F]
    auroc: float  # out of fold; its two or three weights were chosen by the same scores
    weights: dict[str, float]  # of the two opinions, each in logits
    alone: dict[str, float]  # the AUROC of each, out of fold


@dataclass(frozen=True)
class Axes:
    """An affine map of features to standardised ones, or to principal components."""

    mean: Tensor  # [d]
    axes: Tensor  # [d, k]

    def __call__(self, x: Tensor) -> Tensor:
        """Map x `[..., d]` to `[..., k]`."""
        return (x - self.mean) @ self.axes

    def pulled_back(self, weights: Tensor, bias: float) -> Linear:
        """Return a linear score of mapped features as one of the features themselves."""
        direction = self.axes @ weights
        return Linear(direction, bias - float(self.mean @ direction))


def standardised(every: Tensor) -> Axes:
    """Give each feature of `every [M, d]` mean 0 and spread 1; a constant one stays 0."""
    spread = every.std(0, correction=0)
    return Axes(every.mean(0), torch.diag(torch.where(spread > 1e-6, 1 / spread, 0.0)))


def principal(every: Tensor, k: int = COMPONENTS) -> Axes:
    """Find the first k principal components of standardised `every [M, d]`.

    Each is scaled to a spread of the fourth root of its variance: between components as they are,
    where the first drown the others, and whitened ones, where noise counts as much as signal.
    """
    plain = standardised(every)
    z = plain(every).double()
    wide = len(z) < z.shape[1]  # the smaller of the two products has the same eigenvalues
    squares, found = torch.linalg.eigh(z @ z.T if wide else z.T @ z)
    k = min(k, len(squares))
    sizes = squares.flip(0)[:k].clamp(min=0).sqrt()
    right = found.flip(1)[:, :k]
    if wide:
        right = z.T @ right / sizes.clamp(min=1e-12)
    spread = sizes / max(len(z), 1) ** 0.5
    keep = spread > 1e-6
    scaled = right[:, keep] / spread[keep].sqrt()
    scaled = scaled / float(spread[:1].sqrt()) if bool(keep.any()) else scaled
    return Axes(plain.mean, plain.axes @ scaled.float())


def spaced(layers: Sequence[int | str], count: int = LAYERS) -> list[int | str]:
    """Take `count` of the layers, as even as can be, the last of them always."""
    if len(layers) <= count:
        return list(layers)
    return [layers[round((i + 1) * len(layers) / count) - 1] for i in range(count)]


def likelihood_fit(known: Known) -> Linear:
    """Fit the opinion of likelihood alone on all labels; it scores figures `[..., F]`."""
    return _likelihood(known, torch.ones(1, len(known.y), dtype=torch.bool))[0]


def _likelihood(known: Known, rows: Tensor) -> tuple[Linear, Tensor]:
    """Fit on each of `rows [K, N]`; return the last fit, and what each says of all N rows."""
    figured = standardised(torch.cat([known.labelled.likelihood, known.unlabelled.likelihood]))
    prior = torch.zeros(len(FIGURES))
    prior[LAST] = PRIOR
    x = figured(known.labelled.likelihood).expand(*rows.shape, -1)
    fits = ridge_logistic(x, known.y, rows, LIKELIHOOD_RIDGE / len(known.y), prior)
    return figured.pulled_back(fits.weights[-1], float(fits.bias[-1])), fits(x)


def layer_shares(scores: Tensor, y: Tensor) -> Tensor:
    """Say how much each layer counts, `[K]` with sum 1, from out-of-fold scores `[K, N]`.

    By how likely each finds the labels, tempered: few labels leave the layers nearly equal, many
    labels prefer those that know.
    """
    target = y.float().expand(scores.shape)
    loss = F.binary_cross_entropy_with_logits(scores, target, reduction="none").sum(1)
    return (-TEMPER * loss).softmax(0)


def blend(known: Known, layers: Sequence[int | str], seed: int) -> Blend:
    """Fit both opinions on all labels, and weigh them by what they say of rows left out."""
    y, N = known.y, len(known.y)
    out = folds(y, known.groups, seed)
    rows = torch.cat([~out, torch.ones(1, N, dtype=torch.bool)])  # the last fit is on all of them

    said, scores = _likelihood(known, rows)
    opinions = {LIKELIHOOD: out_of_fold(scores[:-1], out)}

    terms: dict[int | str, Linear] = {}
    each = []
    for layer in spaced(layers):
        if layer not in known.unlearned:
            known.unlearned[layer] = principal(known.every(layer))
        axes: Axes = known.unlearned[layer]
        x = axes(known.labelled.at(layer)).expand(*rows.shape, -1)
        fits = ridge_logistic(x, y, rows, STATES_RIDGE / N)
        each.append(out_of_fold(fits(x)[:-1], out))
        terms[layer] = axes.pulled_back(fits.weights[-1], float(fits.bias[-1]))
    shares = layer_shares(torch.stack(each), y)
    opinions[STATES] = shares @ torch.stack(each)

    both = torch.stack(list(opinions.values()), 1)  # [N, 2]
    weighed = ridge_logistic(both[None], y, rows[-1:], WEIGHTS_RIDGE / N, torch.ones(both.shape[1]))
    weights = weighed.weights[0].clamp(min=0.0)  # an opinion fades out; it is not turned round
    for_likelihood, for_states = weights.tolist()
    bias = (float(weighed.bias[0]) + for_likelihood * said.bias) / len(terms)
    parts = {}
    for share, (layer, term) in zip((for_states * shares).tolist(), terms.items(), strict=True):
        parts[layer] = Linear(term.direction * share, term.bias * share + bias)
    return Blend(
        parts,
        said.direction * for_likelihood,
        auroc(both @ weights, y),
        dict(zip(opinions, weights.tolist(), strict=True)),
        {name: auroc(scores, y) for name, scores in opinions.items()},
    )
