"""Teach a transformers model to generate from the screened head, and undo it.

`generate` prepares a list of processors and calls the class's loop, `_sample`, which runs

    the model -> logits of the last position -> processors -> argmax or a draw

A patched model is an instance of a subclass of its class whose `_sample` looks at the prepared
list first. If it can be answered from a few candidates, the tap at the output layer takes h, the
model gets a stand-in for its logits, and one processor stands for all: it finds candidates in the
screen, changes them by transformers' own processors, and gives on scores of which argmax or draw
are those of the dense layer. Where that is not certain it computes the dense logits of that step,
with the product that the model would have computed, and all processors run as ever.

Nothing of the model is replaced. What a call keeps is its own: threads share a model.
"""

import copy
import copyreg
import functools
import threading
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lmhead.body.tap import tapped
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.head.find.locate import locate
from lmhead.head.projection import Projection
from lmhead.patch.asked import read
from lmhead.patch.call import Call
from lmhead.patch.inference import leaves_only_ids, noting_caches, unseen
from lmhead.patch.screen import Choice, Rounding, Screen, check_choice, why_not_now

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound="PreTrainedModel")

_NAME = "_lmhead_generate"


@dataclass(frozen=True)
class GenerateStats:
    """What a patched model did since it was patched.

    - screened, dense: calls of `generate` that used the screened head, and that did not
    - reasons: why they did not, and how often
    - steps: tokens (of all rows at once) from the screen; dense_steps: those among the screened
      calls for which the dense layer was asked, because the screen could not be certain
    """

    screened: int
    dense: int
    reasons: dict[str, int]
    steps: int
    dense_steps: int


@dataclass(frozen=True)
class GeneratePath:
    """How a call of `generate` would be answered: from the screen, or densely, and why."""

    screened: bool
    reason: str

    def __str__(self) -> str:
        return f"{'screened' if self.screened else 'dense'}: {self.reason}"


def patch_generate(model: M, screen: Choice = "auto", rounding: Rounding = "as-model") -> M:
    """Make `model.generate` use the screened head wherever that gives the same tokens.

    Greedy or sampled, a seed gives the same tokens as before. `pipeline` and streamers work too.
    `explain_generate(model, **settings)` says which path a call takes, and `model.lmhead_stats`
    counts them. `screen="auto"` stays dense if numba's compiled loops are missing; "always" does
    not. Returns the model.

    `rounding="as-model"` repeats the rounding of the model's own logits, to bfloat16 for example,
    with equal ones ordered by id; if the rounding is uncertain, the dense layer decides.
    `rounding="exact"` uses the exact scores of the stored weights, which distinguish tokens that
    the model's rounding makes equal or swaps.
    """
    check_choice(screen, rounding)
    from transformers import GenerationMixin

    kind: Any = type(model)
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModel(
            f"{kind.__name__} has no `generate` of transformers; where a model is wrapped (PEFT, "
            "DDP), patch the model inside the wrapper"
        )
    unpatch_generate(model)
    kind = type(model)
    if kind._sample is not GenerationMixin._sample:
        raise UnsupportedModel(
            f"{kind.__name__} has a loop of its own in `_sample`; expected that of transformers"
        )
    patch = _Patch(Screen(screen, rounding, locate(model, Projection).layer_name))
    setattr(model, _NAME, patch)
    model.__class__ = _patched(kind)
    patch.screen.of(model)  # so that the first call does not wait for the copy
    return model


def unpatch_generate(model: M) -> M:
    """Undo `patch_generate`; an unpatched model stays as it is.

    What is left is the tap on the output layer, which does nothing.
    """
    if vars(model).get(_NAME) is not None:
        delattr(model, _NAME)
    kind = type(model)
    if "_lmhead_base" in vars(kind):
        model.__class__ = vars(kind)["_lmhead_base"]
    return model


def explain_generate(model: "PreTrainedModel", **settings: Any) -> GeneratePath:
    """Say which path `model.generate(**settings)` would take, and why, without generating.

    Without `inputs` or `input_ids` the prompt is one token.
    """
    if vars(model).get(_NAME) is None:
        raise BadInput("the model is not patched; call lmhead.patch_generate(model) first")
    settings.pop("streamer", None)
    if settings.get("custom_generate") is not None:
        return GeneratePath(False, "custom_generate has a loop of its own")
    if settings.get("cache_implementation") == "paged":
        return GeneratePath(False, "continuous batching has a loop of its own")
    rest = {name: value for name, value in settings.items() if name != "generation_config"}
    config, _ = model._prepare_generation_config(settings.get("generation_config"), **rest)
    mode = config.get_generation_mode(settings.get("assistant_model"))
    if mode not in ("greedy_search", "sample"):
        return GeneratePath(False, f"{mode.replace('_', ' ')} has a loop of its own")
    if not {"inputs", "input_ids", "inputs_embeds"} & set(settings):
        settings["input_ids"] = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        settings.setdefault("attention_mask", torch.ones_like(settings["input_ids"]))
    token = _explaining.set(model)
    try:
        model.generate(**settings)
    except _Explained as explained:
        return explained.path
    finally:
        _explaining.reset(token)
    raise UnsupportedModel(f"{type(model).__name__} does not generate with transformers' loop")


class _Explained(Exception):
    def __init__(self, path: GeneratePath) -> None:
        self.path = path


_call: ContextVar[Call | None] = ContextVar("lmhead_generate", default=None)
_explaining: ContextVar[Any] = ContextVar("lmhead_explaining", default=None)


@dataclass
class _Patch:
    screen: Screen
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: Any) -> "_Patch":
        return _Patch(copy.deepcopy(self.screen, memo))

    def count(self, what: str, reason: str | None = None) -> None:
        with self.lock:
            self.counts[what] += 1
            if reason is not None:
                self.reasons[reason] += 1

    @property
    def stats(self) -> GenerateStats:
        with self.lock:
            n = self.counts
            return GenerateStats(
                n["screened"], n["dense"], dict(self.reasons), n["step"], n["dense step"]
            )

    def plan(self, model: Any, processors: Any, config: Any, synced: bool) -> "Call | str":
        """Read a prepared call: how it is answered from the screen, or why not."""
        if (why := why_not_now(model)) is not None:
            return why
        if config.is_assistant:
            return "the model drafts for another one"
        for name in ("output_scores", "output_logits"):
            if config.return_dict_in_generate and getattr(config, name):
                return f"{name} asks for all logits"
        if synced:
            return "several processes generate in step"
        ready = self.screen.of(model)
        if isinstance(ready, str):
            return ready
        asked = read(processors, bool(config.do_sample), ready.vocab_size)
        if isinstance(asked, str):
            return asked
        return Call(self.count, model, ready, asked, processors)


@functools.cache
def _patched(kind: Any) -> Any:
    """Return the subclass of a model's class that looks at the call first."""

    @functools.wraps(kind._sample)
    def sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments = {
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "synced_gpus": synced_gpus,
            "streamer": streamer,
            **model_kwargs,
        }
        patch: _Patch | None = vars(self).get(_NAME)
        if patch is None:
            return kind._sample(self, input_ids, logits_processor, **arguments)
        if self._valid_auto_compile_criteria(model_kwargs, generation_config):
            plan: Call | str = "transformers compiles the model for this call"
        else:
            plan = patch.plan(self, logits_processor, generation_config, synced_gpus)
        if _explaining.get() is self:
            raise _Explained(_path(plan))
        if isinstance(plan, str):
            patch.count("dense", plan)
            return kind._sample(self, input_ids, logits_processor, **arguments)
        patch.count("screened")
        token = _call.set(plan)
        try:
            one = type(logits_processor)([plan])
            with tapped(plan.ready.layer, enter=plan.enter, leave=plan.leave):
                if not leaves_only_ids(self, generation_config, arguments):
                    return kind._sample(self, input_ids, one, **arguments)
                with unseen(self):
                    ids = kind._sample(self, input_ids, one, **arguments)
                return ids.clone()
        finally:
            _call.reset(token)

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with noting_caches(kwargs):
            return kind.generate(self, *args, **kwargs)

    @functools.wraps(kind.prepare_inputs_for_generation)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What the loop runs next is its own; what a streamer may run between is not.
        call = _call.get()
        if call is not None and call.model is self:
            call.armed = True
        return kind.prepare_inputs_for_generation(self, *args, **kwargs)

    def reduce(self: Any, _protocol: Any) -> Any:
        kept = {name: value for name, value in vars(self).items() if name != _NAME}
        return copyreg._reconstructor, (kind, object, None), kept  # type: ignore[attr-defined]

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(v, memo) for name, v in vars(self).items()})
        return new

    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {
        "generate": generate,
        "_sample": sample,
        "prepare_inputs_for_generation": prepare,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
        "lmhead_stats": property(lambda self: vars(self)[_NAME].stats),
        "_lmhead_base": kind,
        **about,
    }
    return type(kind.__name__, (kind,), members)


def _path(plan: Call | str) -> GeneratePath:
    if isinstance(plan, str):
        return GeneratePath(False, plan)
    asked = plan.asked
    some = f"the best {asked.top_k}" if asked.top_k else "all tokens"
    what = f"a draw from {some}" if asked.draws else "the best token"
    then = [name for name in ("top_p", "min_p") if getattr(asked, name) is not None]
    changed = f", {len(asked.changes)} changes of known tokens first" if asked.changes else ""
    return GeneratePath(True, " then ".join([what, *then]) + changed)
