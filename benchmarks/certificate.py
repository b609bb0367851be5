"""Can a state be found that breaks a certificate? Real, random and optimised ones try.

    python benchmarks/certificate.py [-m MODEL] [--states 10000] [--steps 12] [--json]

The model's own weights as they are, softcapped and scaled; a random vector, the direction from
false to true statements, and what all rows have in common; each at two strengths. A fifth of the
states are real ones, a fifth begin where the bounds are tight (the two tokens that are moved most
lead all others) and are then optimised to break one bound after the other; the rest are random,
small to large. What is observed is computed in float64 from the very numbers that are added.

Ends with an error where one is above its bound.
"""

import argparse
import json

import torch
from torch import Tensor

from lmhead import load
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.steer import HEAD, Certificate, alpha_for, certify
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.states import read_states

BOUNDS = ("range", "kl", "tv")
BUDGETS = (1.0, 8.0)  # ranges that the two strengths are chosen for
HEADS: dict[str, dict[str, float]] = {
    "plain": {},
    "softcap 30": {"softcap": 30.0},
    "softcap 5": {"softcap": 5.0},
    "scale 0.25": {"scale": 0.25},
    "scale -0.25, softcap 10": {"scale": -0.25, "softcap": 10.0},
}


def observed(head: LMHead, h: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Range of delta, KL and total variation `[n]` of states `[n, d]`, in their dtype."""
    weight = head.weight.detach().to(h.dtype)

    def logits(x: Tensor) -> Tensor:
        z = x @ weight.T
        z = z if head.scale is None else head.scale(z)
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    z, other = logits(h), logits(h + added.to(h.dtype))
    delta = other - z
    p, q = z.log_softmax(-1), other.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    tv = (p.exp() - q.exp()).abs().sum(-1) / 2
    return delta.amax(-1) - delta.amin(-1), kl, tv


def tight(head: LMHead, c: Certificate, real: Tensor, n: int) -> Tensor:
    """States `[n, d]` to begin with: the two tokens that move most lead, or the text is real."""
    weight = head.weight.detach()
    factor = 1.0 if head.scale is None else head.scale.factor
    pair = weight[[int(c.shift.argmax()), int(c.shift.argmin())]]
    moved = torch.stack([c.shift.max(), c.shift.min()]).float() / factor
    halfway = torch.linalg.lstsq(pair, -moved[:, None] / 2).solution.T  # [1, d]
    above = torch.linalg.pinv(pair - weight.mean(0)).sum(1)[None] * (1 if factor > 0 else -1)
    lead = halfway + torch.logspace(-1, 2.3, n // 2)[:, None] * above
    near = halfway + 0.05 * torch.randn(n // 4, weight.shape[1])
    rest = n - len(lead) - len(near)
    return torch.cat([lead, near, real[torch.randint(len(real), (rest,))]])


def attack(head: LMHead, added: Tensor, start: Tensor, what: int, steps: int) -> Tensor:
    """Optimise states to break one bound."""
    h = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([h], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        (-observed(head, h, added)[what].sum()).backward()
        optimiser.step()
    return h.detach()


def vectors(model: Model) -> dict[str, Tensor]:
    rows = builtin_data().rows[::3]
    states = read_states(model, rows).at(HEAD).float()
    y = torch.tensor([row.label for row in rows])
    weight = model.head.weight.detach()
    return {
        "random": torch.randn(weight.shape[1]),
        "true - false": states[y == 1].mean(0) - states[y == 0].mean(0),
        "in common": weight.mean(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=12, help="of the optimiser")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load(options.model)
    weight = model.head.weight.detach()
    with torch.inference_mode():
        texts = [torch.tensor([model.encode(text)]) for text in NEUTRAL]
        real = torch.cat([model.body(ids, use_cache=False)[0][0] for ids in texts]).clone()
    tried = vectors(model)
    each = -(-options.states // (len(HEADS) * len(tried) * len(BUDGETS)))
    worst, states = dict.fromkeys(BOUNDS, 0.0), 0
    rows = []
    for name, changes in HEADS.items():
        head = LMHead(weight, **changes)  # type: ignore[arg-type]
        for which, v in tried.items():
            for budget in BUDGETS:
                alpha = alpha_for(head, v, budget)
                c = certify(head, v, alpha)
                added = v * alpha
                hard = max(4, each // 15)  # for each of the three bounds
                tries = [
                    attack(head, added, tight(head, c, real, hard), what, options.steps)
                    for what in range(len(BOUNDS))
                ]
                tries.append(real[torch.randint(len(real), (each // 5,))])
                left = max(0, each - sum(map(len, tries)))
                tries.append(torch.randn(left, len(v)) * torch.logspace(-1.5, 1.5, left)[:, None])
                h = torch.cat(tries)
                parts = [observed(head, x.double(), added.double()) for x in h.split(64)]
                found = [float(torch.cat(x).max()) for x in zip(*parts, strict=True)]
                bounds = (c.range, c.kl_bound, c.tv_bound)
                ratios = {k: x / b for k, x, b in zip(BOUNDS, found, bounds, strict=True)}
                worst = {k: max(worst[k], ratios[k]) for k in BOUNDS}
                states += len(h)
                rows.append({"head": name, "vector": which, "range": c.range, "worst": ratios})
                if not options.json:
                    reported = "  ".join(f"{k} {r:.9f}" for k, r in ratios.items())
                    print(f"{name:24} {which:14} R = {c.range:.2f}  {reported}", flush=True)
    if options.json:
        print(json.dumps({"states": states, "worst": worst, "cases": rows}, indent=2))
    else:
        print(f"{states:,} states; worst observed over bound: {worst}")
    if max(worst.values()) > 1:
        raise SystemExit("a certificate was broken")


if __name__ == "__main__":
    main()
