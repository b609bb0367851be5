"""What `LMHead` computes: the dense engine, and the reference for every other one.

    z = softcap(scale(W norm(h) + bias))

Symbols: h hidden state `[..., d]`, W weight `[V, d]`, z logits `[..., V]`.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.head.answers import check_k
from lmhead.head.base import Head, check_ids, check_shape
from lmhead.head.own_tensors import OwnTensors
from lmhead.head.rowwise import linear
from lmhead.head.steps import Scale
from lmhead.loss import linear_cross_entropy

_CHUNK = 2**22  # elements looked at together, where a copy is unavoidable
_LINE = 64  # bytes of a cache line


def block_rows(dtype: torch.dtype) -> int:
    """Return how many rows a matrix product works on together, or a multiple of that.

    Whole blocks of rows have the bits that they have in the product with all rows. Kernels for
    float64 work on 12, 24 or 48 rows on some processors, all others on 16, 32 or 64.
    """
    return 192 if dtype == torch.float64 else 64


def taken_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Copy rows of a weight `[V, d]` to memory that begins as far into a cache line as it does.

    On some processors the product with one state adds up from the boundary of a line on, and the
    weight of a mapped file may begin anywhere: the same bits need the same beginning.
    """
    weight = weight.detach()
    size, shape = weight.element_size(), (len(ids), *weight.shape[1:])
    count = len(ids) * weight[:1].numel()
    room = weight.new_empty(count + _LINE // size)
    skip, odd = divmod((weight.data_ptr() - room.data_ptr()) % _LINE, size)
    rows = room[0 if odd else skip :][:count].view(shape)
    return torch.index_select(weight, 0, ids, out=rows)


class Projection(OwnTensors, Head):
    """The final norm, the projection, scale and softcap; see `LMHead` for the arguments."""

    reads_all = True
    weight: Tensor
    bias: Tensor | None
    norm: nn.Module | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: nn.Module | None = None,
        softcap: float | None = None,
        scale: float | Scale | None = None,
        tied: bool = False,
        *,
        logits_dtype: torch.dtype | None = None,
        vocab_size: int | None = None,
        state_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(weight, Tensor):
            raise BadInput(
                f"the weight is a {type(weight).__name__}; expected floating point [V, d], a tensor"
            )
        if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise BadInput(
                f"the weight is {weight.dtype} of shape {list(weight.shape)}; "
                "expected floating point [V, d]"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise BadInput(
                f"the bias has shape {list(bias.shape)}; expected [{weight.shape[0]}], "
                "one number for every row of the weight"
            )
        if softcap is not None and not 0 < softcap < float("inf"):
            raise BadInput(f"softcap is {softcap}; expected a positive number, or None for none")
        if vocab_size is not None:
            check_k(vocab_size, weight.shape[0])
        self._keep("weight", weight)
        self._keep("bias", bias)
        self.norm = norm
        self.softcap = None if softcap is None else float(softcap)
        self.scale = scale if scale is None or isinstance(scale, Scale) else Scale(float(scale))
        self.tied = tied
        self.logits_dtype = logits_dtype
        self._vocab_size = vocab_size or weight.shape[0]
        self.state_size = state_size or weight.shape[1]
        self._digest: tuple[object, str] | None = None

    def _keep(self, name: str, tensor: Tensor | None) -> None:
        # A parameter of a model stays that very parameter, so that training one trains the other;
        # a bare tensor stays that very tensor, so that gradients reach it.
        if tensor is None or isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self._vocab_size

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        return self.weight.shape[1]

    def entering(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Return what enters the projection, `[..., d]`: h, past the norm if it is from a block."""
        if self.norm is not None and from_block:
            h = self.norm(_check_width(h, self.state_size, "the state before the final norm"))
        what = "the state that enters the projection"
        if getattr(h, "shape", ())[-1:] == (self.state_size,) != (self.hidden_size,):
            what += " (pass from_block=True for a state straight from a block)"
        return _check_width(h, self.hidden_size, what)

    def forward(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`.

        `h` is what enters the projection (`last_hidden_state`); `from_block=True` takes the output
        of a block and norms it first.
        """
        h = self.entering(h, from_block=from_block)
        z = linear(h.to(self.weight.dtype), self.weight, self.bias)  # [..., V]
        return self._finish(z)[..., : self.vocab_size]

    def _finish(self, z: Tensor) -> Tensor:
        """Do to logits of any shape what comes after the projection."""
        if self.logits_dtype is not None:
            z = z.to(self.logits_dtype)
        if self.scale is not None:
            z = self.scale(z)
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens: logits `[..., n]`; only their rows are read.

        `ids` are `[n]`, the same for every state, or `[..., n]`, own ones for each. The arithmetic
        is that of `head(h)` but for the order in which d products are added up: before scale and
        softcap the two differ by at most 2 d u |W_i| |h|, u half the distance from 1 to the next
        number (2^-24 in float32, where the sums of 16-bit weights are taken too, and rounded once
        to the weight's dtype).
        """
        h = self.entering(h, from_block=from_block).to(self.weight.dtype)
        ids = check_ids(ids, self.vocab_size, "ids").to(self.weight.device)
        check_shape(ids, h)
        if ids.ndim == 1:
            bias = None if self.bias is None else self.bias[ids]
            return self._finish(F.linear(h, self.weight[ids], bias))
        n = ids.shape[-1]
        own, states = ids.reshape(-1, n), h.reshape(-1, self.hidden_size)
        step = max(1, _CHUNK // max(1, n * self.hidden_size))  # states whose rows are held together
        parts = [
            torch.bmm(self.weight[own[at : at + step]], states[at : at + step].unsqueeze(-1))
            for at in range(0, max(1, len(own)), step)
        ]
        z = torch.cat(parts).squeeze(-1)  # [B, n]
        return self._finish(z if self.bias is None else z + self.bias[own]).view(ids.shape)

    def stretch(self, h: Tensor, first: int, stop: int) -> Tensor:
        """Score the tokens from `first` to before `stop`: `[..., d]` to logits `[..., n]`.

        Only their rows are read, and none is copied. `h` is what enters the projection.
        """
        bias = None if self.bias is None else self.bias[first:stop]
        return self._finish(linear(h.to(self.weight.dtype), self.weight[first:stop], bias))

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets [...]` under the head, with gradients.

        The logits are never held; `options` are those of `linear_cross_entropy` (reduction,
        ignore_index, label_smoothing, z_loss, chunk).
        """
        h = self.entering(h, from_block=from_block)
        weight, bias, V = self.weight, self.bias, self.vocab_size
        if len(weight) > V:  # a slice of everything would cost a second gradient of W's size
            weight, bias = weight[:V], None if bias is None else bias[:V]
        return linear_cross_entropy(
            h,
            weight,
            targets,
            bias,
            softcap=self.softcap,
            scale=None if self.scale is None else self.scale.factor,
            **options,
        )

    @property
    def sha256(self) -> str:
        """What the projection is, as one hexadecimal number.

        It covers shape, dtype and bytes of weight and bias, the scale, the softcap and the number
        of logits, but not the norm. The same weights in another dtype are another head, with
        another number. It is computed when first asked for, and again after the weights changed.
        """
        key = tuple((t.data_ptr(), _version(t)) for t in self._projection())
        if self._digest is None or self._digest[0] != key:
            self._digest = key, self._hash()
        return self._digest[1]

    def _hash(self) -> str:
        about = {
            "shape": list(self.weight.shape),
            "dtype": [_short(t.dtype) for t in self._projection()],
            "scale": self.scale and [self.scale.by, self.scale.divide],
            "softcap": self.softcap,
            "logits": self.vocab_size,
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for tensor in self._projection():
            for rows in _chunks(tensor.detach()):
                # Bytes, because numpy has no bfloat16; a view, unless the rows are strided.
                digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _projection(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def require_finite(self) -> None:
        """Refuse NaN and infinity in weight, bias or norm; say how many and where first."""
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in named.items():
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            tensor = tensor.detach()
            if all(bound.isfinite() for bound in torch.aminmax(tensor)):
                continue  # the usual case, with nothing copied
            bad = torch.cat(  # how many in every row
                [(~rows.isfinite()).reshape(len(rows), -1).sum(1) for rows in _chunks(tensor)]
            )
            raise BadCheckpoint(
                f"the head's {name} holds {int(bad.sum()):,} numbers that are NaN or infinite, the "
                f"first in row {int(bad.nonzero()[0])}; expected finite ones: fetch the model again"
            )

    def __repr__(self) -> str:
        size = sum(t.nbytes for t in self._projection())
        facts = [
            f"{self.weight.shape[0]} x {self.hidden_size} {_short(self.weight.dtype)}",
            f"{size:,} bytes",
            "tied" if self.tied else "untied",
            f"bias={self.bias is not None}",
            f"norm={_one_line(self.norm)}",
            f"scale={self.scale}",
            f"softcap={self.softcap}",
        ]
        if self.logits_dtype is not None:
            facts.append(f"logits_dtype={_short(self.logits_dtype)}")
        if self.vocab_size != self.weight.shape[0]:
            facts.append(f"vocab_size={self.vocab_size}")
        return f"LMHead({', '.join(facts)})"


def _check_width(h: Tensor, width: int, what: str) -> Tensor:
    if not isinstance(h, Tensor):
        raise BadInput(
            f"h is a {type(h).__name__}; expected a torch tensor of hidden states [..., {width}]"
        )
    got = h.shape[-1] if h.ndim else 0
    if got != width:
        raise BadInput(f"h has width {got}, but {what} has {width}; expected h of [..., {width}]")
    if not h.is_floating_point():
        raise BadInput(f"h is {_short(h.dtype)}; expected floating point hidden states, not ids")
    return h


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    tensor = tensor.reshape(tensor.shape or (1,))
    step = max(1, _CHUNK // max(1, tensor[:1].numel()))
    return (tensor[start : start + step] for start in range(0, len(tensor), step))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(module: nn.Module | None) -> str:
    if isinstance(module, nn.Sequential):
        return " > ".join(map(_one_line, module))
    if module is None:
        return "None"
    return f"{type(module).__name__}({module.extra_repr()})"
