"""The sampling controls as options: one for every field of SamplingParams, by the same name.

They are made from the fields themselves, so that Python, JSON and the command line cannot drift
apart. Only what was given on the command line is passed on.
"""

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from lmhead.cli.explain import option
from lmhead.errors import BadInput


class _Control(NamedTuple):
    kind: type
    help: str


# Help is wanted without importing torch, so the names stand here; a test compares them.
CONTROLS: dict[str, _Control] = {
    "temperature": _Control(
        float, "0 is greedy, the default; 1 if another control asks for randomness."
    ),
    "dynatemp_range": _Control(
        float, "Vary the temperature with the entropy, by this much either way."
    ),
    "dynatemp_exponent": _Control(
        float, "The exponent of that dependence on the entropy; 1 by default."
    ),
    "top_k": _Control(int, "Keep the k best tokens."),
    "top_p": _Control(float, "Keep the best tokens up to this share of the probability."),
    "min_p": _Control(float, "Drop tokens below this share of the best one's probability."),
    "typical_p": _Control(
        float,
        "Keep the tokens whose surprise is most typical, up to this share of the probability.",
    ),
    "epsilon_cutoff": _Control(float, "Drop tokens below this probability."),
    "eta_cutoff": _Control(
        float, "Like --epsilon-cutoff, but the cutoff shrinks as the entropy grows."
    ),
    "top_n_sigma": _Control(float, "Keep logits within n standard deviations of the best."),
    "keep_ties": _Control(bool, "Keep every token equal to the last one kept."),
    "xtc_probability": _Control(float, "How often to drop the most obvious tokens."),
    "xtc_threshold": _Control(float, "The probability from which a token counts as obvious."),
    "mirostat": _Control(int, "2 switches mirostat on (version 2)."),
    "mirostat_tau": _Control(float, "The surprise that mirostat aims for, in bits."),
    "mirostat_eta": _Control(float, "How fast mirostat adapts."),
    "dry_multiplier": _Control(float, "Penalise tokens that would continue a repetition (DRY)."),
    "dry_base": _Control(
        float, "How fast the DRY penalty grows with the length of the repetition."
    ),
    "dry_allowed_length": _Control(
        int, "The longest repetition, in tokens, that is not penalised."
    ),
    "dry_penalty_last_n": _Control(int, "How many tokens DRY looks back; -1 means all."),
    "dry_sequence_breakers": _Control(str, "Texts that end a repetition, as a JSON list."),
    "repetition_penalty": _Control(float, "Divide the logits of tokens that occurred before."),
    "presence_penalty": _Control(
        float, "Subtract this from the logits of tokens that are already in the output."
    ),
    "frequency_penalty": _Control(
        float, "Subtract this from a token's logit for each time it is in the output."
    ),
    "penalty_last_n": _Control(
        int, "Apply penalties to the last n tokens of prompt and output instead."
    ),
    "no_repeat_ngram_size": _Control(int, "Never repeat n tokens in a row."),
    "logit_bias": _Control(str, "Biases to add to the logits, as id=bias,id=bias."),
    "allowed_ids": _Control(str, "Draw only these ids, as id,id."),
    "banned_ids": _Control(str, "Never draw these ids, as id,id."),
    "min_tokens": _Control(int, "Do not end before this many tokens."),
    "stop_ids": _Control(str, "Also stop at these ids, as id,id."),
    "json_schema": _Control(
        str, "Make the text follow a JSON schema (a file, or the schema itself)."
    ),
    "regex": _Control(str, "Make the text match a regular expression."),
    "grammar": _Control(
        str, "Make the text follow a Lark grammar (a file, or the grammar itself)."
    ),
    "seed": _Control(int, "The same seed gives the same text, whatever else is in the batch."),
    "logprobs": _Control(int, "Report this many alternatives to every token, with --json."),
    "logprobs_mode": _Control(str, "raw (the model's own) or processed (what was drawn from)."),
}


def with_controls(
    *, without: Sequence[str] = (), **helps: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per sampling control; it gets the given ones as `controls`.

    without: controls that mean nothing to the command. helps: what it says of some in its own way.
    """
    names = [name for name in CONTROLS if name not in without]
    extra = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                CONTROLS[name].kind | None,
                typer.Option(
                    option(name),
                    help=helps.get(name, CONTROLS[name].help),
                    rich_help_panel="Sampling",
                    show_default=False,
                ),
            ],
        )
        for name in names
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "controls"]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            controls = {name: given.pop(name) for name in names}
            controls = {n: _parse(n, v) for n, v in controls.items() if v is not None}
            command(**given, controls=controls)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*keyword, *extra]
        )
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
        return wrapper

    return decorate


def _parse(name: str, value: Any) -> Any:
    try:
        if name in ("allowed_ids", "banned_ids", "stop_ids"):
            return tuple(int(i) for i in value.split(","))
        if name == "logit_bias":
            pairs = (pair.split("=") for pair in value.split(","))
            return {int(i): float(bias) for i, bias in pairs}
        if name == "dry_sequence_breakers":
            return tuple(json.loads(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{option(name)} is {value!r:.200}; expected {_EXPECTED[name]}") from error
    if name in ("json_schema", "grammar"):
        return _text_or_file(name, value)
    return value


_EXPECTED = {
    **dict.fromkeys(("allowed_ids", "banned_ids", "stop_ids"), "ids separated by commas: 11,42"),
    "logit_bias": "ids and what to add to their logits, separated by commas: 11=2.5,42=-1",
    "dry_sequence_breakers": """a JSON list of texts: '["\\\\n", ":"]'""",
}


def _text_or_file(name: str, value: str) -> str:
    """Return what a file holds, or the value itself; a path that does not exist is neither."""
    path = Path(value)
    try:
        if "\n" not in value and path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # not UTF-8, or too long for a file's name
        if not isinstance(error, OSError) or len(value) < 256:
            raise BadInput(f"{option(name)}: cannot read {value}: {error}") from error
    if name == "json_schema":
        if value.lstrip()[:1] not in ("{", "t", "f") or path.suffix == ".json":
            raise BadInput(
                f"{option(name)} is {value!r}; there is no such file, and it is not a JSON schema"
            )
    elif ":" not in value or ("\n" not in value and path.suffix in (".lark", ".gbnf", ".txt")):
        raise BadInput(
            f"{option(name)} is {value!r}; there is no such file, and it is not a Lark grammar, "
            "which has lines such as start: WORD"
        )
    return value
