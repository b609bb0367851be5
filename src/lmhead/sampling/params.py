"""What a caller may ask of the sampler: every control, its range, and the filter it belongs to.

The field names are the ones of the command line and of JSON. Every filter is off by default;
the value that switches it off is its default.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from lmhead.errors import BadInput

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0: dividing by it would overflow float32."""


class Range(NamedTuple):
    """The values a number may take; `open_low`/`open_high` leave the end out."""

    low: float
    high: float = math.inf
    whole: bool = False
    open_low: bool = False
    open_high: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Tell whether value lies in this range (NaN and bool never do)."""
        if value is None:
            return self.optional
        kinds: tuple[type, ...] = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:  # a whole number of hundreds of digits
            return False
        low = number > self.low if self.open_low else number >= self.low
        high = number < self.high if self.open_high else number <= self.high
        return low and high and math.isfinite(number)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = f"{'above' if self.open_low else 'from'} {self.low:g}"
        high = f" {'below' if self.open_high else 'to'} {self.high:g}"
        where = low if self.high == math.inf else low + high
        return f"{kind} {where}{' or null' if self.optional else ''}"


RANGES: dict[str, Range] = {
    "temperature": Range(0),
    "dynatemp_range": Range(0),
    "dynatemp_exponent": Range(0),
    "top_k": Range(0, whole=True),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, open_low=True),
    "epsilon_cutoff": Range(0, 1, open_high=True),
    "eta_cutoff": Range(0, 1, open_high=True),
    "top_n_sigma": Range(0),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 0.5),
    "mirostat_tau": Range(0),
    "mirostat_eta": Range(0),
    "dry_multiplier": Range(0),
    "dry_base": Range(1),
    "dry_allowed_length": Range(1, whole=True),
    "dry_penalty_last_n": Range(-1, whole=True),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
    "penalty_last_n": Range(-1, whole=True, optional=True),
    "no_repeat_ngram_size": Range(0, whole=True),
    "min_tokens": Range(0, whole=True),
    "seed": Range(0, 2**64 - 1, whole=True, optional=True),
    "logprobs": Range(0, whole=True, optional=True),
}


BIAS = Range(-1e9, 1e9)


class FilterFields(NamedTuple):
    """The fields of one filter: it runs when a switch differs from its default."""

    switches: tuple[str, ...]
    details: tuple[str, ...] = ()


FILTERS: dict[str, FilterFields] = {
    "guided": FilterFields(("json_schema", "regex", "grammar")),
    "allowed_ids": FilterFields(("allowed_ids",)),
    "banned_ids": FilterFields(("banned_ids",)),
    "min_tokens": FilterFields(("min_tokens",), ("stop_ids",)),
    "logit_bias": FilterFields(("logit_bias",)),
    "repetition_penalty": FilterFields(("repetition_penalty",), ("penalty_last_n",)),
    "frequency_penalty": FilterFields(("frequency_penalty",), ("penalty_last_n",)),
    "presence_penalty": FilterFields(("presence_penalty",), ("penalty_last_n",)),
    "no_repeat_ngram": FilterFields(("no_repeat_ngram_size",)),
    "dry": FilterFields(
        ("dry_multiplier",),
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ),
    "temperature": FilterFields(("temperature", "dynatemp_range"), ("dynatemp_exponent",)),
    "top_n_sigma": FilterFields(("top_n_sigma",)),
    "top_k": FilterFields(("top_k",), ("keep_ties",)),
    "top_p": FilterFields(("top_p",), ("keep_ties",)),
    "min_p": FilterFields(("min_p",)),
    "typical_p": FilterFields(("typical_p",), ("keep_ties",)),
    "epsilon": FilterFields(("epsilon_cutoff",)),
    "eta": FilterFields(("eta_cutoff",)),
    "xtc": FilterFields(("xtc_probability",), ("xtc_threshold",)),
    "mirostat": FilterFields(("mirostat",), ("mirostat_tau", "mirostat_eta")),
}
"""Every filter's name, with the fields that set it."""

RANDOM = (
    "temperature",
    "dynatemp_range",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_n_sigma",
    "xtc_probability",
    "mirostat",
)
"""The controls that ask for randomness: they shape a draw, and do nothing to a greedy choice."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. Raises BadInput for a value out of its range.

    temperature: 0 is greedy. With dynatemp_range r > 0 the temperature moves within
        temperature ± r (never below 0) with (entropy / largest entropy) ** dynatemp_exponent.
    top_k: 0 is off. keep_ties keeps every token equal to the last one kept, in top_k, top_p and
        typical_p; otherwise the lowest ids come first among equals.
    top_p, typical_p: 1 is off. min_p, epsilon_cutoff, eta_cutoff, top_n_sigma: 0 is off.
    xtc_probability: how often XTC drops every token of probability xtc_threshold or more but the
        least probable of them. mirostat: 0 or 2.
    repetition_penalty counts prompt and output; presence_penalty and frequency_penalty the output.
        With penalty_last_n all three count the last n tokens of prompt and output (-1: all of
        them), which is llama.cpp's rule.
    stop_ids: the ids that end a text; banned until min_tokens are drawn.
    json_schema, regex, grammar (Lark): at most one; needs the extra `guided` and a tokenizer.
    logprobs: how many best alternatives to report beside the drawn token; None for no report.
    logprobs_mode: "raw" (the model's own logits) or "processed" (what was drawn from).
    """

    temperature: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    keep_ties: bool = False
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: str = "raw"

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if not allowed.holds(value):
                raise BadInput(f"{name} is {value!r}; expected {allowed}", names=[name])
        if self.mirostat not in (0, 2) or isinstance(self.mirostat, bool):
            raise BadInput(
                f"mirostat is {self.mirostat!r}; expected 0 (off) or 2 (version 2)",
                names=["mirostat"],
            )
        if self.logprobs_mode not in ("raw", "processed"):
            raise BadInput(
                f"logprobs_mode is {self.logprobs_mode!r}; expected 'raw' or 'processed'",
                names=["logprobs_mode"],
            )
        for name in ("keep_ties",):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(
                    f"{name} is {getattr(self, name)!r}; expected true or false", names=[name]
                )
        for name in ("allowed_ids", "banned_ids", "stop_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.allowed_ids == ():
            raise BadInput(
                "allowed_ids is empty; expected at least one id, or null to allow all",
                names=["allowed_ids"],
            )
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "dry_sequence_breakers", _texts(self.dry_sequence_breakers))
        given = [n for n in FILTERS["guided"].switches if getattr(self, n) is not None]
        if len(given) > 1:
            raise BadInput(
                f"{' and '.join(given)} are given; expected at most one of them", names=given
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make parameters from a JSON object; an unknown name is an error that lists the known
        ones.

        >>> SamplingParams.from_dict({"top_k": 50}).top_k
        50
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise BadInput(f"{name!r} is not a sampling parameter; {nearest(name, names)}")
        return cls(**values)

    @classmethod
    def asked(cls, controls: Mapping[str, Any]) -> Self:
        """Make parameters from the controls that a caller gave: greedy unless one calls for
        sampling.

        Only a control that implies randomness (`RANDOM`) turns sampling on, at temperature 1 if
        temperature is not among them. A ban, bias, penalty, grammar or seed does not, and neither
        does a control at its off value.

        >>> SamplingParams.asked({"banned_ids": [7]}).temperature
        0.0
        >>> SamplingParams.asked({"top_k": 50, "banned_ids": [7]}).temperature
        1.0
        """
        params = cls.from_dict(controls)
        draws = any(getattr(params, name) != getattr(_DEFAULTS, name) for name in RANDOM)
        if draws or "temperature" in controls:
            return params
        return dataclasses.replace(params, temperature=0.0)

    @property
    def greedy(self) -> bool:
        """Whether the best remaining token is taken instead of a random draw."""
        return self.temperature < GREEDY_BELOW and self.dynatemp_range == 0

    @property
    def random(self) -> bool:
        """Whether two texts of the same prompt can differ."""
        return not self.greedy or self.xtc_probability > 0

    def to_dict(self) -> dict[str, Any]:
        """Return every field as JSON-safe data; `from_dict` reads it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["logit_bias"] = {str(i): b for i, b in self.logit_bias.items()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def active(self) -> tuple[str, ...]:
        """Return the names of the filters that are switched on."""
        return tuple(
            name
            for name, fields in FILTERS.items()
            if any(getattr(self, f) != getattr(_DEFAULTS, f) for f in fields.switches)
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """Say which known names there are, the closest first."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}expected one of {', '.join(known)}"


def _ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadInput(f"{name} is {values!r}; expected a list of token ids", names=[name])
    ids = tuple(values)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise BadInput(f"{name} holds {i!r}; expected token ids from 0", names=[name])
    return tuple(dict.fromkeys(ids))


def _bias(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise BadInput(
            f"logit_bias is {values!r}; expected a map from token id to a number",
            names=["logit_bias"],
        )
    bias = {}
    for key, value in values.items():
        # JSON has only text as keys
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise BadInput(
                f"logit_bias has the key {key!r}; expected token ids from 0", names=["logit_bias"]
            )
        if not BIAS.holds(value):
            raise BadInput(
                f"logit_bias of {token} is {value!r}; expected {BIAS}; "
                "to forbid a token use banned_ids",
                names=["logit_bias", "banned_ids"],
            )
        bias[token] = float(value)
    return bias


def _texts(values: object) -> tuple[str, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadInput(
            f"dry_sequence_breakers is {values!r}; expected a list of texts",
            names=["dry_sequence_breakers"],
        )
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise BadInput(
                f"dry_sequence_breakers holds {text!r}; expected non-empty texts",
                names=["dry_sequence_breakers"],
            )
    return texts


_DEFAULTS = SamplingParams()
