"""Find the head in any causal language model, by what the model does and not by what it is called.

The model works on two tokens while `trace` watches. From the logits it returned we go back, call
by call: what was done to the logits after the projection (a scale, a softcap, a cast), the linear
layer that made them, and what stands before that up to the last block (the final norm, mostly).
Whatever cannot be told in the words of LMHead is refused, never guessed; and the head that was
found must give the logits of that run again, bit by bit.
"""

from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lmhead.errors import UnsupportedModel
from lmhead.head.find.trace import Call, record, tensors_in
from lmhead.head.projection import Projection
from lmhead.head.steps import POINTWISE, Cast, Pointwise, Scale

_ALIASES = {
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "divide": "div",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
}
# What only takes rows, or puts them elsewhere; dropout does nothing in inference.
_MOVES = {"contiguous", "clone", "detach", "dropout", "getitem", "to", "cpu", "cuda"}
_MOVES |= {"flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"}
_CASTS = {
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
}


P = TypeVar("P", bound=Projection)


@dataclass(frozen=True)
class Located(Generic[P]):
    """A head, and where it stands in its model."""

    head: P
    layer: nn.Module  # the module whose forward is the projection
    layer_name: str
    norm_names: tuple[str, ...]  # the modules of the model that make up the norm, in order


def locate(
    model: nn.Module,
    make: type[P] = Projection,  # type: ignore[assignment]
    /,
    **inputs: Any,
) -> Located[P]:
    """Find the head of a causal language model; it shares the model's parameters.

    `make` is what the head is to be; `inputs` replaces the arguments of the trial run. On the meta
    device nothing is computed.
    """
    kind = type(model).__name__
    if not getattr(model, "can_generate", lambda: True)():
        raise UnsupportedModel(
            f"{kind} has no head that generates text; expected a causal language model: "
            "load it with AutoModelForCausalLM, if its architecture has one"
        )
    calls, result = _trial(model, inputs)
    logits = getattr(result, "logits", None)
    if isinstance(result, Tensor | tuple):  # a model told not to name its results
        logits = next(tensors_in(result), None)
    if not isinstance(logits, Tensor):
        raise UnsupportedModel(
            f"{kind} returns no logits, so it is a body without a head; "
            "load the model with AutoModelForCausalLM"
        )
    after, linear = _after_projection(kind, calls, logits)
    before = _before_projection(model, calls, linear)
    names = {module: name for name, module in model.named_modules()}
    head, moves = _read(kind, model, make, linear, after, before)
    _verify(kind, head, linear, logits, moves, before)
    layer = _owner(calls, linear)
    if layer is None:
        raise UnsupportedModel(
            f"{kind} multiplies by a weight outside of any layer; expected an output layer"
        )
    steps = tuple(names[c.what] for c in reversed(before) if isinstance(c.what, nn.Module))
    return Located(head, layer, names[layer], steps)


def output_layer(model: nn.Module) -> nn.Module:
    """Return the module whose input is h and whose forward is the projection."""
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if getter is not None else None
    return layer if isinstance(layer, nn.Linear) else locate(model, Projection).layer


def _trial(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Call], Any]:
    if not inputs:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        # Token 0 is in every vocabulary.
        inputs["input_ids"] = torch.zeros(1, 2, dtype=torch.long, device=device)
    if "use_cache" in signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    try:
        return record(model, inputs)
    except Exception as error:  # whatever the model's own code may raise
        if any(tensor.is_meta for tensor in tensors_in(inputs)):
            way_out = "load the whole model and give it to LMHead.from_model"
        else:
            way_out = "pass what its forward needs: LMHead.from_model(model, input_ids=..., ...)"
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModel(
            f"{type(model).__name__} failed on the trial run with {', '.join(inputs)} "
            f"({type(error).__name__}: {reason}); {way_out}"
        ) from error


def _after_projection(kind: str, calls: list[Call], logits: Tensor) -> tuple[list[Call], Call]:
    """Go back from the logits to the linear layer; return what was done after it, in order."""
    after: list[Call] = []
    z, end = logits, len(calls)
    while True:
        i = _last(calls, z, end, functions_only=True)
        if i is None:
            raise UnsupportedModel(
                f"the logits of {kind} are not made by a linear layer ({_story(after)})"
            )
        call = calls[i]
        if call.name == "linear":
            return after[::-1], call
        after.append(call)
        if len(call.inputs) != 1:
            raise UnsupportedModel(
                f"{kind} does more with its logits than scale, softcap or cast them: "
                f"{_story(after)}; expected the logits of one linear layer"
            )
        z, end = call.inputs[0], i


def _before_projection(model: nn.Module, calls: list[Call], linear: Call) -> list[Call]:
    """Go back from the projection's input to the last block; the nearest call comes first.

    Blocks are the members of a ModuleList. A call that mixes several activations, or changes how
    many there are, belongs to the body as well.
    """
    parameters = {id(p) for p in (*model.parameters(), *model.buffers())}
    blocks = {b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m}
    before: list[Call] = []
    h, end = linear.inputs[0], linear.start
    while (i := _last(calls, h, end)) is not None:
        call = calls[i]
        if isinstance(call.what, nn.Module):
            if call.what in blocks:
                break
            if not _is_step(call):
                end = i  # a container: look at what it consists of
                continue
            if not _same_rows(call, call.inputs[0]):
                break
            before.append(call)
            h, end = call.inputs[0], call.start
            continue
        sources = [t for t in call.inputs if id(t) not in parameters and t.is_floating_point()]
        if len(sources) != 1:
            break
        if len(call.inputs) != 1 or _verb(call) is None:
            if _same_rows(call, sources[0]) and not any(
                isinstance(c.what, nn.Module) for c in before
            ):
                raise UnsupportedModel(
                    f"{type(model).__name__} has {call.name} between its last block and its "
                    "output layer, which cannot be repeated; expected a norm, a projection or "
                    "a scale"
                )
            break
        before.append(call)
        h, end = sources[0], i
    return before


def _last(calls: list[Call], made: Tensor, end: int, *, functions_only: bool = False) -> int | None:
    """Return the last call before `end` that made (or returned) a tensor: the outermost one."""
    for i in range(end - 1, -1, -1):
        call = calls[i]
        if isinstance(call.what, nn.Module) and functions_only:
            continue
        if any(t is made for t in tensors_in(call.result)):
            return i
    return None


def _is_step(call: Call) -> bool:
    """Whether a module maps one tensor of floats to another and holds no stack of blocks."""
    return (
        isinstance(call.what, nn.Module)
        and isinstance(call.result, Tensor)
        and len(call.inputs) == 1
        and call.inputs[0].is_floating_point()
        and not any(isinstance(m, nn.ModuleList) for m in call.what.modules())
    )


def _same_rows(call: Call, source: Tensor) -> bool:
    result: Tensor = call.result
    return result.shape[:-1] == source.shape[:-1]


def _verb(call: Call) -> str | None:
    """Say what a function of one tensor does: "move", "cast", a pointwise name, or None."""
    name = _ALIASES.get(call.name, call.name)
    if _cast_to(call) is not None:
        return "cast"
    if name in _MOVES and call.result.shape[-1:] == call.inputs[0].shape[-1:]:
        return "move"
    args, kwargs = call.constants
    plain = all(isinstance(c, Real | str) for c in (*args, *kwargs.values()))
    return name if name in POINTWISE and plain else None


def _cast_to(call: Call) -> torch.dtype | None:
    if call.name in _CASTS:
        return _CASTS[call.name]
    args, kwargs = call.constants
    dtypes = [c for c in (*args, *kwargs.values()) if isinstance(c, torch.dtype)]
    return dtypes[0] if dtypes and call.name in ("to", "type") else None


def _read(
    kind: str,
    model: nn.Module,
    make: type[P],
    linear: Call,
    after: list[Call],
    before: list[Call],
) -> tuple[P, list[Call]]:
    """Say in the words of LMHead what was found; return also the moves among the logits."""
    weight = linear.inputs[1]
    bias = linear.inputs[2] if len(linear.inputs) > 2 else None
    known = {id(p) for p in (*model.parameters(), *model.buffers())}
    if id(weight) not in known or not (bias is None or id(bias) in known):
        raise UnsupportedModel(
            f"{kind} computes the weight of its output layer anew in every run; "
            "expected a parameter"
        )
    moves = [call for call in after if _verb(call) == "move"]
    todo = [(_verb(call), call) for call in after if _verb(call) != "move"]
    settings: dict[str, Any] = {}

    def take(verb: str) -> Call | None:
        return todo.pop(0)[1] if todo and todo[0][0] == verb else None

    if call := take("cast"):
        settings["logits_dtype"] = _cast_to(call)
    verbs = [verb for verb, _ in todo]
    if verbs[-3:] == ["div", "tanh", "mul"] and _number(todo[-3][1]) == _number(todo[-1][1]):
        settings["softcap"] = _number(todo[-1][1])
        del todo[-3:]
    if call := take("mul"):
        settings["scale"] = Scale(_number(call))
    elif call := take("div"):
        settings["scale"] = Scale(_number(call), divide=True)
    if settings.get("scale") in (Scale(1.0), Scale(1.0, divide=True)):
        del settings["scale"]  # multiplying by 1 changes no bit
    if len(todo) == 1 and (cut := _cut(todo[0][1])) is not None:
        settings["vocab_size"] = cut
        todo.clear()
    if todo:
        raise UnsupportedModel(
            f"{kind} does more with its logits than scale, softcap or cast them: "
            f"{_story(after[::-1])}"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    norm = _norm(before)
    if norm is not None:
        settings["state_size"] = before[-1].inputs[0].shape[-1]
    tied = _same_storage(weight, getattr(embedding, "weight", None))
    return make(weight, bias, norm, tied=tied, **settings), moves


def _same_storage(weight: Tensor, other: Tensor | None) -> bool:
    if weight is other or other is None or weight.is_meta:
        return weight is other
    return weight.data_ptr() == other.data_ptr() and weight.shape == other.shape


def _number(call: Call) -> float:
    args, kwargs = call.constants
    return float(next(iter((*args, *kwargs.values()))))


def _cut(call: Call) -> int | None:
    """Return n where the call is `z[..., :n]`."""
    if call.name != "getitem" or not isinstance(call.args[1], tuple):
        return None
    *rows, last = call.args[1]
    whole = all(i is Ellipsis or i == slice(None) for i in rows)
    return last.stop if whole and isinstance(last, slice) and last == slice(last.stop) else None


def _norm(before: list[Call]) -> nn.Module | None:
    """Make one module of what stands before the projection."""
    steps: list[nn.Module] = []
    for call in reversed(before):
        if isinstance(call.what, nn.Module):
            if not isinstance(call.what, nn.Dropout | nn.Identity):
                steps.append(call.what)
        elif (dtype := _cast_to(call)) is not None:
            steps.append(Cast(dtype))
        elif (verb := _verb(call)) != "move":
            args, kwargs = call.constants
            steps.append(Pointwise(str(verb), *args, **kwargs))
    if steps and isinstance(steps[-1], Cast):
        steps.pop()  # LMHead itself casts h to the weight's dtype
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else nn.Sequential(*steps)


def _verify(
    kind: str, head: Projection, linear: Call, logits: Tensor, moves: list[Call], before: list[Call]
) -> None:
    """Check that the head gives what the model gave: equal bits, or on meta equal shapes."""
    x = linear.inputs[0]  # [..., d]
    with torch.no_grad():
        z = head(x)
        for move in moves:
            z = move.again(z)
        if not _equal(z, logits):
            raise UnsupportedModel(
                f"the head that was found in {kind} does not give the model's own logits; "
                "something acts on them that cannot be seen from outside"
            )
        if head.norm is None or x.is_meta:
            return
        h = before[-1].inputs[0]  # [..., d] as it leaves the last block
        rows = head.norm(h).to(x.dtype)
        # On the way rows may have been moved or left out, but those at the end are the same.
        count = x.numel() // x.shape[-1]
        same = _equal(rows.reshape(-1, x.shape[-1])[-count:], x.reshape(-1, x.shape[-1]))
        one, last = head.norm(h[..., -1:, :]).to(x.dtype), rows[..., -1:, :]
        if not same or not torch.allclose(one, last, rtol=1e-2, atol=1e-4, equal_nan=True):
            raise UnsupportedModel(
                f"what stands between the last block and the output layer of {kind} is not a norm: "
                f"it looks at more than one position ({type(head.norm).__name__})"
            )


def _equal(z: Tensor, logits: Tensor) -> bool:
    if z.shape != logits.shape or z.dtype != logits.dtype or z.is_meta:
        return z.shape == logits.shape and z.dtype == logits.dtype
    # As bytes, so that a NaN that both have is no difference.
    return torch.equal(z.contiguous().view(torch.uint8), logits.contiguous().view(torch.uint8))


def _owner(calls: list[Call], linear: Call) -> nn.Module | None:
    """Return the innermost module in whose forward the projection was called."""
    end = calls.index(linear)
    around = (c for c in calls[end:] if isinstance(c.what, nn.Module) and c.start <= end)
    owner = next(around, None)
    return owner.what if owner is not None and isinstance(owner.what, nn.Module) else None


def _story(calls: list[Call]) -> str:
    """Name the calls from the projection to the logits, given the other way round."""
    return " > ".join(["projection", *(call.name for call in reversed(calls)), "logits"])
