"""What a call of transformers' `generate` asks of the head, read from its prepared processors.

A call can be answered from a few candidates if each of its processors either changes logits of
ids that are known beforehand, each by itself and a greater one never to a lesser (penalties,
biases, bans), or is one of the cuts that follow in transformers' own order: temperature, top_k,
top_p, min_p. Everything else needs all logits, and `read` says what.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST = 1024
"""The largest top_k that is looked for in the screen; the dense layer serves a larger one."""

_Ids = Callable[[Any, Tensor], Tensor]


def _seen(_: Any, row: Tensor) -> Tensor:
    return row


def _last_of_each(processor: Any, row: Tensor) -> Tensor:
    return row.new_tensor([ids[-1] for ids in processor.sequence_bias])


def _named(attribute: str) -> _Ids:
    def ids(processor: Any, row: Tensor) -> Tensor:
        return torch.as_tensor(getattr(processor, attribute), device=row.device).flatten()

    return ids


# The ids whose logits a processor may change, of a row of tokens; by the processor's class.
_TOUCHES: dict[str, _Ids] = {
    "MinLengthLogitsProcessor": _named("eos_token_id"),
    "MinNewTokensLengthLogitsProcessor": _named("eos_token_id"),
    "NoBadWordsLogitsProcessor": _last_of_each,
    "NoRepeatNGramLogitsProcessor": _seen,
    "RepetitionPenaltyLogitsProcessor": _seen,
    "SequenceBiasLogitsProcessor": _last_of_each,
    "SuppressTokensAtBeginLogitsProcessor": _named("begin_suppress_tokens"),
    "SuppressTokensLogitsProcessor": _named("suppress_tokens"),
}
# The cuts, in the order in which transformers makes them, and the attribute that has the number.
_CUTS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
_SAID = {
    "TopHLogitsWarper": "top_h looks at all probabilities",
    "TypicalLogitsWarper": "typical_p looks at all probabilities",
    "EpsilonLogitsWarper": "epsilon_cutoff looks at all probabilities",
    "EtaLogitsWarper": "eta_cutoff looks at all probabilities",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale changes all logits",
    "WatermarkLogitsProcessor": "a watermark changes all logits",
    "SynthIDTextWatermarkLogitsProcessor": "a watermark changes all logits",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn may allow any token",
    "LogitNormalization": "renormalize_logits needs all logits",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values needs all logits",
    "ForcedBOSTokenLogitsProcessor": "a forced first token needs no head",
    "ForcedEOSTokenLogitsProcessor": "a forced last token needs no head",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty is not bounded",
}


@dataclass(frozen=True)
class Asked:
    """What a call asks for: changes of logits, then cuts, then the best token or a draw."""

    changes: tuple[Any, ...] = ()  # transformers' own processors, in their order
    draws: bool = False
    temperature: float = 1.0
    top_k: int = 1  # 0: all tokens
    top_p: float | None = None
    min_p: float | None = None

    def touched(self, input_ids: Tensor, V: int) -> list[Tensor] | None:
        """Give the ids below V that the changes may touch, ascending, for each row `[B, T]`."""
        if not self.changes:
            return None
        named = [(_TOUCHES[type(change).__name__], change) for change in self.changes]
        rows = [torch.cat([ids(c, row) for ids, c in named]) for row in input_ids]
        return [torch.unique(ids[(ids >= 0) & (ids < V)]) for ids in rows]


def read(processors: Iterable[Any], draws: bool, V: int) -> Asked | str:
    """Read prepared processors, or say why they need all logits."""
    rest = list(processors)
    changes: list[Any] = []
    while rest and _ours(rest[0], _TOUCHES):
        changes.append(rest.pop(0))
    cuts: dict[str, Any] = {}
    order = list(_CUTS)
    while rest and _ours(rest[0], order):
        cut = rest.pop(0)
        name = type(cut).__name__
        order = order[order.index(name) + 1 :]
        cuts[_CUTS[name]] = getattr(cut, _CUTS[name])
        if getattr(cut, "min_tokens_to_keep", 1) != 1 or cut_value(cut) != -torch.inf:
            return f"{name} has settings of its own"
    if rest:
        name = type(rest[0]).__name__
        if _ours(rest[0], _SAID):
            return _SAID[name]
        if _ours(rest[0], [*_TOUCHES, *_CUTS]):
            return f"{name} stands at another place than transformers puts it"
        return f"{name} is a processor that is not known here: it may need all logits"
    return _check(changes, cuts, draws, V)


def cut_value(cut: Any) -> float:
    """Tell what a cut puts in the place of what it takes away."""
    return float(getattr(cut, "filter_value", -torch.inf))


def _check(changes: Sequence[Any], cuts: dict[str, Any], draws: bool, V: int) -> Asked | str:
    names = [type(change).__name__ for change in changes]
    if names.count("SequenceBiasLogitsProcessor") > 1:
        return "two sequence biases may cancel"
    if not draws:
        if cuts:
            return f"{next(iter(cuts))} without do_sample is not transformers' own order"
        return Asked(tuple(changes))
    if cuts.get("top_k", 0) > min(MOST, V):
        return f"top_k is {cuts['top_k']:,}; from the screen up to {min(MOST, V):,}"
    if 0 < cuts.get("min_p", 1) < 1e-30:
        return "min_p is next to nothing"
    return Asked(tuple(changes), True, **{"top_k": 0, **cuts})


def _ours(processor: Any, names: Iterable[str]) -> bool:
    """Tell whether it is of one of these classes of transformers, and not of one derived."""
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ in names
