"""Teach a transformers model to compute its loss without the logits, and undo it.

A causal model of transformers ends with `logits = output_layer(h)`, some arithmetic on the logits,
and `self.loss_function(logits, labels, ...)`. Two hooks on the model, the tap on its output layer
and that one attribute are all it takes:

    model called with labels -> the tap at the output layer: keep h, pass on none of its rows
                             -> the model works on empty logits, [B, 0, V]
                             -> loss_function: linear_cross_entropy of the h that was kept

No line of the model is replaced, so whatever else its `forward` does stays. The hooks are methods
of one object without a reference to the model: a copy of a patched model is a patched model. What
a call keeps is its own, in a ContextVar: threads train and generate with one model side by side.
"""

import inspect
from contextlib import ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmhead.body.tap import tapped
from lmhead.errors import UnsupportedModel
from lmhead.head.find.locate import locate
from lmhead.head.find.parallel import is_parallel, located_parallel
from lmhead.head.projection import Projection
from lmhead.loss import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound="PreTrainedModel")

_NAME = "_lmhead_loss_patch"


def patch_loss(model: M, *, eval_logits: bool = True) -> M:
    """Make a transformers causal model compute its loss without ever holding the logits.

    A training script or `Trainer` stays as it is: `model(input_ids, labels=labels).loss` is the
    same loss with the same gradients. What changes is `.logits` of such a call, which then has no
    row, [B, 0, V]. Calls without labels, and so `generate`, are not touched.

    With gradients off, as in an evaluation, the model still computes its logits, because metrics
    read them; `eval_logits=False` saves that memory too. Patching again only changes that choice.
    Returns the model.

    Of a tensor-parallel model, whose head is split over ranks (transformers' `tp_plan`), each rank
    computes the loss over its own rows; the ranks exchange four numbers for each token.
    """
    kind = type(model).__name__
    if not _calls_loss_function(model):
        raise UnsupportedModel(
            f"{kind} does not call `self.loss_function` in its forward; expected a causal model of "
            "transformers: where it is wrapped (PEFT, DDP), patch the model inside the wrapper"
        )
    unpatch_loss(model)
    original = model.loss_function
    from transformers.loss.loss_utils import ForCausalLMLoss

    if original is not ForCausalLMLoss:
        raise UnsupportedModel(
            f"{kind} has the loss {getattr(original, '__name__', original)}; expected "
            "ForCausalLMLoss: only the plain next-token loss can be computed without the logits"
        )
    split = is_parallel(model)
    found = located_parallel(model, Projection) if split else locate(model, Projection)
    head = found.head
    if not isinstance(found.layer, nn.Linear):
        raise UnsupportedModel(
            f"the output layer of {kind} is a {type(found.layer).__name__}; "
            "expected a torch.nn.Linear"
        )
    if split and head.vocab_size != len(head.weight):
        raise UnsupportedModel(
            f"{kind} cuts off the logits of padding rows, and its head is split over ranks; "
            "expected one or the other: train it as it is"
        )
    names = list(inspect.signature(model.forward).parameters)
    patch = _LossPatch(
        original=original,
        was_set="_loss_function" in vars(model),
        labels_at=names.index("labels"),
        layer_name=found.layer_name,
        rows=None if head.vocab_size == len(head.weight) else head.vocab_size,
        scale=None if head.scale is None else head.scale.factor,
        softcap=head.softcap,
        eval_logits=eval_logits,
        split=split,
    )
    patch.handles = [
        model.register_forward_pre_hook(patch.begin, with_kwargs=True),
        model.register_forward_hook(patch.end, always_call=True),
    ]
    model.loss_function = patch.loss
    setattr(model, _NAME, patch)
    return model


def unpatch_loss(model: M) -> M:
    """Undo `patch_loss`; an unpatched model stays as it is.

    What is left after a call with labels is the tap on the output layer, which does nothing.
    """
    patch: _LossPatch | None = vars(model).get(_NAME)
    if patch is not None:
        for handle in patch.handles:
            handle.remove()
        if patch.was_set:
            model.loss_function = patch.original
        else:
            del model._loss_function  # what the setter of `loss_function` had set
        delattr(model, _NAME)
    return model


def _calls_loss_function(model: object) -> bool:
    forward = inspect.unwrap(getattr(type(model), "forward", _calls_loss_function))
    return "loss_function" in forward.__code__.co_names


@dataclass
class _Call:
    """One forward pass with labels that is under way."""

    patch: "_LossPatch"  # whose model it is
    layer: nn.Linear
    tap: ExitStack = field(default_factory=ExitStack)
    h: Tensor | None = None  # [..., d]
    token: "Token[_Call | None] | None" = None

    def begin(self) -> None:
        """Wait at the output layer."""
        leave = self.empty if self.patch.split else None
        self.tap.enter_context(tapped(self.layer, enter=self.keep, leave=leave))
        self.token = _call.set(self)

    def keep(self, h: Tensor) -> Tensor:
        """Keep what enters the output layer, and let none of its rows through."""
        self.h = h
        if self.patch.split:  # a DTensor cannot have no rows: one goes through, and is dropped
            return h.detach().reshape(-1, h.shape[-1])[:1].view(*[1] * (h.ndim - 1), -1)
        return h.narrow(-2, 0, 0)

    def empty(self, z: Tensor) -> Tensor:
        """Give logits without rows in the place of the one row that came through."""
        assert self.h is not None
        return z.new_empty(*self.h.shape[:-2], 0, z.shape[-1])

    def end(self) -> None:
        """Leave the output layer alone again."""
        assert self.token is not None
        _call.reset(self.token)
        self.tap.close()


_call: ContextVar[_Call | None] = ContextVar("lmhead_loss", default=None)


@dataclass
class _LossPatch:
    original: Any  # the loss function that the model had,
    was_set: bool  # by its own attribute and not by its class
    labels_at: int  # where `labels` stands among the arguments of forward
    layer_name: str  # of the output layer; by name, because resizing the vocabulary replaces it
    rows: int | None  # where the model cuts off the logits of padding rows, how many it keeps
    scale: float | None
    softcap: float | None
    eval_logits: bool
    split: bool = False  # whether the head's rows are over several ranks
    handles: list[RemovableHandle] = field(default_factory=list)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Wait at the output layer, if the call has labels; one without runs as ever."""
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        evaluation = not torch.is_grad_enabled()
        if labels is None or (evaluation and self.eval_logits):
            return
        layer = model.get_submodule(self.layer_name)
        if isinstance(layer, nn.Linear):  # and not what someone put in its place, an adapter say
            _Call(self, layer).begin()

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for transformers' ForCausalLMLoss."""
        call = _call.get()
        if call is None or call.patch is not self or call.h is None:
            value: Tensor = self.original(*args, **kwargs)
            return value
        h, call.h = call.h, None
        weight: Tensor = call.layer.weight  # [V, d]
        bias: Tensor | None = call.layer.bias  # [V]
        if self.rows is not None:
            weight, bias = weight[: self.rows], None if bias is None else bias[: self.rows]
        return self._loss(h, weight, bias, *args[1:], **kwargs)

    def _loss(
        self,
        h: Tensor,  # [B, T, d]
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,  # [B, T]
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,  # [B, T]
        **_: Any,
    ) -> Tensor:
        targets = shift_labels
        if targets is None:
            # the last position predicts nothing, each other one the token after it
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            h,
            weight,
            targets.to(h.device),
            bias,
            softcap=self.softcap,
            scale=self.scale,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget the call, also after an error."""
        call = _call.get()
        if call is None or call.patch is not self:
            return  # it had no labels
        call.end()
        if call.h is not None and output is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} did not ask for its loss although it got labels; "
                "call unpatch_loss(model) and train it as it is"
            )
