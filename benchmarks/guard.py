"""Does the guard keep its cap at every token, and what does it cost?

    python benchmarks/guard.py [--model M] [--cap 0.1] [--alpha 30] [--tokens 100]

A mean-difference vector (true less false statements, layer 15), strong enough to wreck the text, is
used on ten prompts: not at all, as it is, and guarded. Then every guarded text is read once more by
the plain transformers model in one pass without a cache, and the KL of each token's distribution is
taken from those logits and the ones that the guarded head gave.
"""

import argparse
import json
import time

import torch
from torch import Tensor

from lmhead import SteeringVector, generate, load
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.steer import guard, steer_model
from lmhead.steer.bound.auditing import distinct_2
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.states import read_states

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "To bake bread, you first",
    "The history of the Roman Empire",
    "My favourite season is",
    "In the year 2050, cities will",
    "A good teacher is someone who",
    "The main reason why birds sing is",
    "Dear Sir or Madam,",
    "The ocean is home to",
)


class Recorded(Head):
    """A guarded head that remembers every logit it gave."""

    reads_all = True

    def __init__(self, inner: Head) -> None:
        self.inner = inner
        self.given: list[Tensor] = []

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.inner.vocab_size

    @property
    def hidden_size(self) -> int:
        """The width of what it reads."""
        return self.inner.hidden_size

    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token, and remember."""
        z = self.inner(h, from_block=from_block)
        self.given.append(z.clone())
        return z


def difference(model: Model, layer: int, alpha: float) -> SteeringVector:
    """Return the mean state of true statements less that of false ones."""
    rows = builtin_data().rows
    x = read_states(model, rows).at(layer)
    y = torch.tensor([row.label for row in rows])
    return SteeringVector(x[y == 1].mean(0) - x[y == 0].mean(0), layer, alpha)


def kl(z: Tensor, given: Tensor) -> Tensor:
    """KL of each position `[n]` from logits `[n, V]`."""
    log_p, log_q = z.double().log_softmax(-1), given.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def main() -> None:
    """Run, and print one line per prompt and the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--alpha", type=float, default=30.0)
    parser.add_argument("--cap", type=float, default=0.1, help="in nat")
    parser.add_argument("--tokens", type=int, default=100, help="of each prompt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = load(args.model)
    vector = difference(model, args.layer, args.alpha)
    guarded = guard(model, vector, kl_cap=args.cap)
    head = Recorded(guarded.head)
    ways = {
        "plain": model,
        "steered": steer_model(model, vector),
        "guarded": guarded.model,
    }
    seconds, distinct = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    tokens, worst, over = 0, 0.0, 0
    for prompt in PROMPTS:
        head.given.clear()
        for name, which in ways.items():
            start = time.perf_counter()
            # no text ends before its time
            (result,) = generate(
                prompt,
                which,
                max_tokens=args.tokens,
                min_tokens=args.tokens,
                temperature=0.0,
                head=head if name == "guarded" else None,
            )
            seconds[name] += time.perf_counter() - start
            distinct[name] += distinct_2(result.ids) / len(PROMPTS)
            if not args.json:
                print(f"{name:>8}  {prompt} |{result.text[:90]!r}")
        with torch.no_grad():
            ids = torch.tensor([[*result.prompt_ids, *result.ids]])
            z = model.body.model(ids, use_cache=False).logits[0, len(result.prompt_ids) - 1 : -1]
        found = kl(z[:, : model.reachable], torch.cat(head.given)[:, : model.reachable])
        tokens += len(found)
        worst = max(worst, float(found.max()))
        over += int((found > args.cap).sum())
    total = {
        "tokens": tokens,
        "cap": args.cap,
        "largest_kl": worst,
        "over_the_cap": over,
        "held_back": guarded.log.held_back,
        "mean_strength": guarded.log.mean_strength,
        "distinct_2": distinct,
        "time_over_steered": seconds["guarded"] / seconds["steered"],
        "time_over_plain": seconds["guarded"] / seconds["plain"],
    }
    print(json.dumps(total, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
