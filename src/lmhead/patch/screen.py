"""The screened head of a model that lives on: made once, made anew when the output layer changed.

A model may be trained, resized, converted or given an adapter after it was patched. Before each
call its output layer is looked at, and `Screen.of` gives a head that belongs to it as it is now,
or says why there is none.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lmhead.body import tap
from lmhead.errors import BadInput, LMHeadError
from lmhead.head.dense import LMHead
from lmhead.head.find.locate import locate
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.known import Known
from lmhead.head.screening.ranking import Transform
from lmhead.head.screening.rows import ScreenedRow
from lmhead.patch.certain import Floats, U

_TINY = 1e-30  # what may be lost where numbers are too small to be normal
_STEP_AT_ZERO = 2.0**-23  # more than the steps of float16 next to 0
_FAR = 2.0**15  # float16 ends soon after
Choice = Literal["auto", "always"]
Rounding = Literal["as-model", "exact"]
_CHECKED = 4096  # rows whose logits in 16 bits are compared with what is expected of them
_PROBED = 64  # rows that are compared before each call
_TOGETHER = 1024  # rows that are held in float64 at a time


@dataclass(frozen=True)
class Ready:
    """A screened head of an output layer, and how far the layer's own logits are from its.

    `head` has the layer alone, its raw scores; `dense` what the model does to them as well.
    """

    head: ScreenedHead
    dense: LMHead
    layer: nn.Linear
    sizes: Floats  # [V + 1], |W_i| of every row; the last is the largest
    biases: Floats  # [V + 1], |bias_i|, likewise
    made_of: tuple[Any, ...]
    probe: tuple[Tensor, ...]  # some rows of the weight [_PROBED, d] and the bias, as they were
    rounding: Rounding

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.head.vocab_size

    @property
    def transform(self) -> Transform:
        """What the model does to raw scores, in real numbers."""
        scale = self.dense.scale
        return Transform(1.0 if scale is None else scale.factor, self.dense.softcap or 0.0)

    @property
    def bare(self) -> bool:
        """Whether a logit is the score itself, rounded."""
        return self.dense.scale is None and self.dense.softcap is None

    def fits(self, layer: nn.Linear) -> bool:
        """Tell whether the layer's numbers are still those that the copy was made of."""
        return self.made_of == _made_of(layer) and all(
            torch.equal(was, now) for was, now in zip(self.probe, _probe(layer), strict=True)
        )

    def errors(self, h: Tensor, ids: npt.NDArray[np.int64]) -> Floats:
        """Bound how far sums in float32 are from the exact scores, for states `[B, d]` and ids.

        In whatever order d products are added up in float32, and whether or not a product is
        rounded before, the sum is off by at most d u |W_i| |h| (and a hair). Eight more u are for
        the bias and for our own rounding to float32. `ids [B, n]`; the id V stands for the worst of
        all. An exact answer has none but the last.
        """
        wide = h.detach().numpy().astype(np.float64)
        sizes = np.sqrt((wide * wide).sum(-1, keepdims=True))  # [B, 1]
        reach = self.sizes[ids] * sizes + self.biases[ids]
        terms = 1 if self.rounding == "exact" else self.dense.hidden_size + 8
        bound: Floats = 1.01 * terms * U * reach
        return bound + _TINY

    def leads(self, h: Tensor, ids: npt.NDArray[np.int64], z: npt.NDArray[np.float32]) -> bool:
        """Tell whether the best token of each state leads by more than all roundings together.

        Of candidates `[B, n]`, best first, it must beat the second, were that one as wrong as any
        token can be. A shortcut: what it does not decide may still be certain.
        """
        if not self.bare or z.shape[1] < 2:
            return False
        both = np.stack((ids[:, 0], np.full(len(ids), self.vocab_size)), axis=1)
        e = self.errors(h, both)
        low, high = z[:, 0] - e[:, 0], z[:, 1] + e[:, 1]
        most = np.maximum(np.abs(low), np.abs(high))
        step = 0.0
        if self.rounding == "as-model" and self.layer.weight.dtype != torch.float32:
            # Two numbers that are further apart than the step at the larger stay apart.
            step = torch.finfo(self.layer.weight.dtype).eps
        return bool(((low - high > step * most + _STEP_AT_ZERO) & (most < _FAR)).all())

    def ends(self, z: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Give both ends of the model's logits in float32, of raw scores z and their errors.

        Each step of the model is monotone, and so is rounding: it is enough to take the ends of the
        raw score through the same steps, in the model's dtype.
        """
        if self.rounding == "exact":
            y = torch.from_numpy(self.transform(z.double().numpy())).float()
            return y, y
        z, e = z.double(), e.double()
        return self._model_logits(z - e, -1), self._model_logits(z + e, 1)

    def _model_logits(self, z: Tensor, towards: int) -> Tensor:
        dtype = self.layer.weight.dtype
        if dtype == torch.float32:  # outwards; to round to 16 bits to the nearest is what they do
            near = z.float()
            short = near > z if towards < 0 else near < z
            end = torch.full_like(near, towards * torch.inf)
            y = self.dense._finish(torch.where(short, torch.nextafter(near, end), near))
            if self.dense.softcap is not None:  # tanh need not be monotone in its last bits
                y = y + towards * 8 * U * self.dense.softcap
            return y
        return self.dense._finish(z.to(dtype)).float()

    @property
    def unit(self) -> float:
        """How much of a logit the model's roundings after the sum can change, at most."""
        if self.rounding == "exact":
            return U
        steps = 1 + (self.dense.scale is not None) + 3 * (self.dense.softcap is not None)
        return steps * torch.finfo(self.layer.weight.dtype).eps / 2 * 1.01


@dataclass
class Screen:
    """The screened head of one model, as it is now."""

    choice: Choice
    rounding: Rounding
    layer_name: str  # by name, because resizing the vocabulary replaces the layer
    ready: Ready | None = None
    no: tuple[tuple[Any, ...], str] | None = None  # a layer that cannot be screened, and why
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, _memo: Any) -> "Screen":
        """Begin anew for a copy of the model: its weights are others."""
        return Screen(self.choice, self.rounding, self.layer_name)

    def of(self, model: Any) -> Ready | str:
        """Give the head of the model as it is now, or say why it has none."""
        layer = model.get_submodule(self.layer_name)
        if type(layer) is not nn.Linear:
            return f"the output layer is a {type(layer).__name__}, not a torch.nn.Linear"
        if layer.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the output layer is {str(layer.weight.dtype).removeprefix('torch.')}"
        if layer.weight.device.type != "cpu":
            return f"the output layer is on {layer.weight.device}, not on the cpu"
        if not _plain(layer):
            return "the output layer has hooks, or a forward, of somebody else"
        if tap.is_tapped(layer):
            return "something else takes what passes the output layer in this very call"
        with self.lock:
            if self.ready is None or not self.ready.fits(layer):
                made_of = _made_of(layer)
                if self.no is not None and self.no[0] == made_of:
                    return self.no[1]
                first = self.ready is None and self.no is None
                self.ready = None
                try:
                    made = _make(model, layer, self.choice, self.rounding, stored=first)
                except LMHeadError as error:
                    made = str(error)
                if isinstance(made, str):
                    self.no = made_of, made
                    return made
                self.ready = made
            return self.ready


def _make(
    model: Any, layer: nn.Linear, choice: Choice, rounding: Rounding, stored: bool
) -> Ready | str:
    found = locate(model, LMHead)
    if found.layer is not layer:
        return f"the output layer has moved to {found.layer_name}"
    head = found.head
    if head.logits_dtype not in (None, torch.float32, layer.weight.dtype):
        return f"the model gives its logits in {head.logits_dtype}"
    if layer.bias is not None and layer.weight.dtype != torch.float32:
        return "the output layer has a bias in 16 bits, which may be rounded once or twice"
    head.require_finite()
    # Weights that have just changed have no copy in any file; to look for one would hash them.
    folder = Path(getattr(model.config, "_name_or_path", "") or "-") if stored else None
    screened = ScreenedHead.from_head(head, folder)
    if choice == "auto" and not screened.compiled:
        return "numba's compiled loops are not at hand, and without them the dense layer is faster"
    if head.scale is not None or head.softcap is not None:
        raw = LMHead(head.weight, head.bias, vocab_size=head.vocab_size)
        screened = ScreenedHead(raw, screened.screen, path=screened.path)
    weight = layer.weight.detach()[: head.vocab_size]
    parts = [weight[at : at + _TOGETHER] for at in range(0, len(weight), _TOGETHER)]
    sizes = torch.cat([rows.double().norm(dim=1) for rows in parts])
    biases = torch.zeros_like(sizes)
    if layer.bias is not None:
        biases = layer.bias.detach()[: head.vocab_size].double().abs()
    ready = Ready(
        screened,
        head,
        layer,
        sizes=_with_largest(sizes),
        biases=_with_largest(biases),
        made_of=_made_of(layer),
        probe=tuple(numbers.clone() for numbers in _probe(layer)),
        rounding=rounding,
    )
    if rounding == "as-model" and not _rounds_as_expected(ready):
        return "the output layer's own rounding is not that of sums in float32"
    if screened.compiled:
        _compile_loops(screened)
    return ready


def _compile_loops(head: ScreenedHead) -> None:
    """Ask what calls will ask, so that numba compiles its loops now, or reads them from disk."""
    h = torch.ones(1, head.hidden_size, dtype=torch.float32)
    head.topk(h, 1)
    with head.rows(h, [torch.tensor([0])]) as rows:
        for row in rows:
            if isinstance(row, ScreenedRow):
                Known(row.query, row.touched, row.transform, 1.0).measure()
                row.query.best(1)
    head.stats.clear()


@torch.no_grad()
def _rounds_as_expected(ready: Ready) -> bool:
    """Hold the layer's own logits of some states against the ends that we give them."""
    dense, weight = ready.dense, ready.layer.weight.detach()
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2):
        h = torch.randn(n, 1, dense.hidden_size, generator=generator).to(weight.dtype)
        logits = dense(h)[:, 0]  # [n, V]
        ids = torch.randint(dense.vocab_size, (_CHECKED,), generator=generator)
        z = h[:, 0].double() @ weight[ids].double().T
        if dense.bias is not None:
            z += dense.bias[ids]
        e = torch.from_numpy(ready.errors(h[:, 0].float(), ids.numpy()[None].repeat(n, 0)))
        low, high = ready.ends(z, e)
        got = logits[:, ids].float()
        if not bool(((low <= got) & (got <= high)).all()):
            return False
    return True


def _with_largest(sizes: Tensor) -> Floats:
    return np.append(sizes.numpy(), sizes.max().item())


def _made_of(layer: nn.Linear) -> tuple[Any, ...]:
    """Tell where the layer's numbers lie, and how often they were written to."""
    return tuple(
        None
        if t is None
        else (t.data_ptr(), t.shape, t.dtype, -1 if t.is_inference() else t._version)
        for t in (layer.weight, layer.bias)
    )


def _probe(layer: nn.Linear) -> tuple[Tensor, ...]:
    # `weight.data += x`, as PEFT merges an adapter, leaves the address and the version alone.
    weight = layer.weight.detach()
    rows = weight[:: max(1, len(weight) // _PROBED)][:_PROBED]
    return (rows,) if layer.bias is None else (rows, layer.bias.detach())


def _plain(module: nn.Module) -> bool:
    """Tell whether nobody but us watches or changes what the module does."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" not in vars(module) and all(_is_ours(hook) for hook in hooks)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("lmhead.")


def why_not_now(model: Any) -> str | None:
    """Say what about the model itself, besides its output layer, asks for the dense one."""
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are on"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if not _plain(model):
        return "the model has hooks, or a forward, of somebody else"
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if not _full_precision():
        return "float32 products are computed with less than float32"
    return None


def _full_precision() -> bool:
    if torch.is_autocast_enabled("cpu"):
        return False
    own = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none")
    try:
        return own in ("none", "ieee") and torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by both of torch's ways to set it, differently
        return False


def check_choice(choice: str, rounding: str) -> None:
    """Refuse a choice that there is not."""
    if choice not in ("auto", "always"):
        raise BadInput(f"screen is {choice!r}; expected 'auto' or 'always'")
    if rounding not in ("as-model", "exact"):
        raise BadInput(f"rounding is {rounding!r}; expected 'as-model' or 'exact'")
