"""From parameters to filters that can run: one entry for each name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.sampling import filters, penalties
from lmhead.sampling.breakers import breakers_of
from lmhead.sampling.candidates import Candidates
from lmhead.sampling.guided import Guide, compile_guide
from lmhead.sampling.params import FILTERS, GREEDY_BELOW, SamplingParams
from lmhead.sampling.state import SequenceState

Apply = Callable[[Candidates, Sequence[SequenceState]], Candidates]
Touches = Callable[[SequenceState], Tensor]


@dataclass(frozen=True)
class Filter:
    """A named step on candidates `[B, N]`, with one sequence per row.

    settings are its parameters, for reports. masks: it can forbid every token of a row.
    touches: the ids `[n]` of a sequence that it may change, where it leaves all others alone.
    """

    name: str
    settings: Mapping[str, Any]
    apply: Apply
    masks: bool = False
    touches: Touches | None = None


MASKS = frozenset({"guided", "allowed_ids", "banned_ids", "min_tokens", "no_repeat_ngram"})


def build(
    p: SamplingParams, names: Sequence[str], vocab_size: int | None, tokenizer: Any
) -> tuple[tuple[Filter, ...], Guide | None]:
    """Make the named filters, and compile the grammar if there is one."""
    if vocab_size is not None:
        for field in ("allowed_ids", "banned_ids", "logit_bias"):
            ids = torch.tensor(list(getattr(p, field) or ()), dtype=torch.int64)
            penalties.check_ids(field, ids, vocab_size)
    guide = None
    if "guided" in names:
        if tokenizer is None:
            raise BadInput("json_schema, regex and grammar need the tokenizer: give tokenizer=")
        guide = compile_guide(
            tokenizer,
            json_schema=p.json_schema,
            regex=p.regex,
            grammar=p.grammar,
            stop_ids=p.stop_ids,
        )
    made = []
    for name in names:
        fields = FILTERS[name].switches + FILTERS[name].details
        apply = _dry(p, tokenizer) if name == "dry" else _APPLY[name](p)
        values = p.to_dict()
        touches = _TOUCHES[name](p) if name in _TOUCHES else None
        made.append(Filter(name, {f: values[f] for f in fields}, apply, name in MASKS, touches))
    return tuple(made), guide


def _kept(rule: Callable[[Tensor], Tensor]) -> Apply:
    """Make a step of a truncation, which sees nothing but the logits."""
    return lambda c, seqs: c.keep(rule(c.z))


def _guided(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
    masks = [s.guide.mask(c.V) if s.guide else torch.ones(c.V, dtype=torch.bool) for s in seqs]
    allowed = torch.stack(masks)
    if c.ids is not None:
        allowed = torch.nn.functional.pad(allowed, (0, 1)).gather(-1, c.ids)
    return c.keep(allowed & filters.alive(c.z))


def _allowed_ids(p: SamplingParams) -> Apply:
    ids = torch.tensor(p.allowed_ids or (), dtype=torch.int64)

    def apply(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
        penalties.check_ids("allowed_ids", ids, c.V)
        return c.among(ids)

    return apply


def _banned_ids(p: SamplingParams) -> Apply:
    ids = torch.tensor(p.banned_ids, dtype=torch.int64)

    def apply(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
        penalties.check_ids("banned_ids", ids, c.V)
        return c.without([ids] * len(seqs))

    return apply


def _min_tokens(p: SamplingParams) -> Apply:
    stop, none = torch.tensor(p.stop_ids, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    def apply(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
        early = [len(s.output_ids) < p.min_tokens for s in seqs]
        return c.without([stop if e else none for e in early]) if any(early) else c

    return apply


def _temperature(p: SamplingParams) -> Apply:
    if p.dynatemp_range == 0:
        if p.temperature < GREEDY_BELOW:
            return lambda c, seqs: c.only(c.z.argmax(-1))
        return lambda c, seqs: Candidates(c.z / p.temperature, c.ids, c.V)
    low = max(0.0, p.temperature - p.dynatemp_range)
    high = p.temperature + p.dynatemp_range

    def apply(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
        largest = c.left().double().log().unsqueeze(-1)
        # a lone candidate has no entropy to compare with, and any temperature will do
        share = torch.where(largest > 0, filters.entropy(c.z) / largest, 0.0).clamp_(0, 1)
        T = low + (high - low) * share**p.dynatemp_exponent
        greedy = T < GREEDY_BELOW
        z = (c.z / T.masked_fill(greedy, 1.0)).float()
        first = torch.zeros_like(z, dtype=torch.bool)
        first.scatter_(-1, c.z.argmax(-1, keepdim=True), True)
        return Candidates(z.masked_fill_(greedy & ~first, -torch.inf), c.ids, c.V)

    return apply


def _xtc(p: SamplingParams) -> Apply:
    def apply(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
        chosen = torch.tensor([s.uniform() < p.xtc_probability for s in seqs])
        return c.keep(filters.xtc(c.z, p.xtc_threshold, chosen)) if bool(chosen.any()) else c

    return apply


def _mirostat(c: Candidates, seqs: Sequence[SequenceState]) -> Candidates:
    mu = torch.tensor([s.mu for s in seqs], dtype=torch.float64)
    return c.keep(filters.mirostat(c.z, mu))


def _dry(p: SamplingParams, tokenizer: Any) -> Apply:
    if p.dry_sequence_breakers and tokenizer is None:
        raise BadInput(
            "DRY's sequence breakers need the tokenizer: give tokenizer=, or set "
            "dry_sequence_breakers to an empty list"
        )
    found = breakers_of(tokenizer, p.dry_sequence_breakers) if p.dry_sequence_breakers else {}
    return lambda c, seqs: penalties.dry(
        c,
        seqs,
        multiplier=p.dry_multiplier,
        base=p.dry_base,
        allowed_length=p.dry_allowed_length,
        last_n=p.dry_penalty_last_n,
        breakers=found,
    )


_APPLY: dict[str, Callable[[SamplingParams], Apply]] = {
    "guided": lambda p: _guided,
    "allowed_ids": _allowed_ids,
    "banned_ids": _banned_ids,
    "min_tokens": _min_tokens,
    "logit_bias": lambda p: lambda c, seqs: penalties.logit_bias(c, p.logit_bias),
    "repetition_penalty": lambda p: (
        lambda c, seqs: penalties.repetition_penalty(
            c, seqs, p.repetition_penalty, p.penalty_last_n
        )
    ),
    "frequency_penalty": lambda p: (
        lambda c, seqs: penalties.frequency_penalty(c, seqs, p.frequency_penalty, p.penalty_last_n)
    ),
    "presence_penalty": lambda p: (
        lambda c, seqs: penalties.presence_penalty(c, seqs, p.presence_penalty, p.penalty_last_n)
    ),
    "no_repeat_ngram": lambda p: (
        lambda c, seqs: penalties.no_repeat_ngram(c, seqs, p.no_repeat_ngram_size)
    ),
    "temperature": _temperature,
    "top_n_sigma": lambda p: _kept(lambda z: filters.top_n_sigma(z, p.top_n_sigma)),
    "top_k": lambda p: _kept(lambda z: filters.top_k(z, p.top_k, p.keep_ties)),
    "top_p": lambda p: _kept(lambda z: filters.top_p(z, p.top_p, p.keep_ties)),
    "min_p": lambda p: _kept(lambda z: filters.min_p(z, p.min_p)),
    "typical_p": lambda p: _kept(lambda z: filters.typical_p(z, p.typical_p, p.keep_ties)),
    "epsilon": lambda p: _kept(lambda z: filters.epsilon(z, p.epsilon_cutoff)),
    "eta": lambda p: _kept(lambda z: filters.eta(z, p.eta_cutoff)),
    "xtc": _xtc,
    "mirostat": lambda p: _mirostat,
}


def _always(ids: Iterable[int]) -> Touches:
    known = torch.tensor(list(ids), dtype=torch.int64)
    return lambda s: known


_TOUCHES: dict[str, Callable[[SamplingParams], Touches]] = {
    "banned_ids": lambda p: _always(p.banned_ids),
    "min_tokens": lambda p: _always(p.stop_ids),
    "logit_bias": lambda p: _always(p.logit_bias),
    "repetition_penalty": lambda p: lambda s: s.seen(p.penalty_last_n),
    "frequency_penalty": lambda p: lambda s: s.tally(p.penalty_last_n).ids,
    "presence_penalty": lambda p: lambda s: s.tally(p.penalty_last_n).ids,
    # these two only ever name tokens that occurred before
    "no_repeat_ngram": lambda p: lambda s: s.seen(None),
    "dry": lambda p: lambda s: s.seen(None),
}
