"""Random sampling settings, and what Python's sampler makes of them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmhead.sampling import ORDERS, Sampler, SamplingParams
from lmhead.sampling.params import FILTERS


def random_settings(rng: random.Random, ids: Sequence[int]) -> dict[str, Any]:
    """Switch some controls on, most of them at values that a slider has."""

    def some(share: float) -> bool:
        return rng.random() < share

    params: dict[str, Any] = {}
    if some(0.6):
        params["temperature"] = rng.choice([0.0, round(rng.uniform(0.05, 2), 2)])
    if some(0.2):
        params["dynatemp_range"] = round(rng.uniform(0.05, 2), 2)
        params["dynatemp_exponent"] = round(rng.uniform(0.2, 3), 1)
    if some(0.4):
        params["top_k"] = rng.choice([1, 2, 5, 40, 1000, 30000, 10**6])
    if some(0.5):
        params["top_p"] = rng.choice([0.0, round(rng.random(), 2)])
    if some(0.3):
        params["min_p"] = round(rng.uniform(0, 0.5), 3)
    if some(0.3):
        params["typical_p"] = round(rng.uniform(0.05, 0.99), 2)
    if some(0.2):
        params["epsilon_cutoff"] = round(rng.uniform(0, 0.01), 4)
    if some(0.2):
        params["eta_cutoff"] = round(rng.uniform(0, 0.01), 4)
    if some(0.25):
        params["top_n_sigma"] = round(rng.uniform(0.1, 5), 1)
    if some(0.25):
        params["xtc_probability"] = rng.choice([0.5, 1.0])
        params["xtc_threshold"] = round(rng.uniform(0, 0.3), 2)
    if some(0.15):
        params |= {"mirostat": 2, "mirostat_tau": round(rng.uniform(0.5, 8), 1)}
    if some(0.3):
        params["repetition_penalty"] = round(rng.uniform(0.8, 2), 2)
    if some(0.2):
        params["presence_penalty"] = round(rng.uniform(-2, 2), 1)
    if some(0.2):
        params["frequency_penalty"] = round(rng.uniform(-2, 2), 1)
    if some(0.2):
        params["penalty_last_n"] = rng.choice([-1, 0, 3, 64])
    if some(0.2):
        params["no_repeat_ngram_size"] = rng.randint(1, 4)
    if some(0.3):
        params["dry_multiplier"] = round(rng.uniform(0.1, 4), 1)
        params["dry_allowed_length"] = rng.randint(1, 3)
    if some(0.2):
        params["min_tokens"] = rng.randint(1, 20)
    if some(0.2):
        params["banned_ids"] = rng.sample(list(ids), min(3, len(ids)))
    if some(0.1):
        params["logit_bias"] = {str(i): round(rng.uniform(-5, 5), 1) for i in rng.sample(ids, 2)}
    if some(0.1):
        params["allowed_ids"] = rng.sample(range(20000), 5000)
    if some(0.3):
        params["keep_ties"] = True
    return params


def random_order(rng: random.Random) -> str | list[str]:
    """Take a named order, or any."""
    if rng.random() < 0.7:
        return rng.choice(list(ORDERS))
    names = [name for name in FILTERS if name != "guided"]
    rng.shuffle(names)
    return names


def cases(count: int, seed: int, prompt: list[int], output: list[int]) -> list[dict[str, Any]]:
    """Make settings that the page and Python will be compared on."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        order = random_order(rng)
        made.append(
            {
                "params": random_settings(rng, [*prompt, *output]),
                "order": list(ORDERS[order]) if isinstance(order, str) else order,
                "prompt": prompt,
                "output": output[: rng.randint(0, len(output))],
                "seed": rng.randrange(2**31),
            }
        )
    return made


def pythons(
    case: dict[str, Any], logits: torch.Tensor, vocab_size: int, stop_ids: Sequence[int], tok: Any
) -> dict[str, Any]:
    """Run Python's sampler on logits `[V]`: what is left, its probabilities, and the trace."""
    params = replace(SamplingParams.from_dict(case["params"]), stop_ids=tuple(stop_ids))
    sampler = Sampler.from_params(params, case["order"], vocab_size=vocab_size, tokenizer=tok)
    state = sampler.start(case["prompt"], seed=case["seed"])
    for token in case["output"]:
        state.accept(token)
    uniform = state.copy().uniform()
    [trace] = sampler.trace(logits[None], [state.copy()])
    c = sampler.process(logits[None], [state.copy()])
    alive = c.z[0] > -torch.inf
    ids = alive.nonzero()[:, 0] if c.ids is None else c.ids[0, alive]
    p = sampler.process(logits[None], [state.copy()]).z[0].double().softmax(-1)[alive]
    steps = [s for s in trace.steps if s.name != "padding"]
    return {
        "uniform": uniform,
        "ids": ids.tolist(),
        "p": p.tolist(),
        "steps": [[s.name, s.left, s.cut, s.moved] for s in steps],
    }
