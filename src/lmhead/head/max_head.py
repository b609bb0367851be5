"""MaxHead: the dense head's projection as a Modular MAX graph.

The norm stays in torch; projection, bias, scale and softcap are one graph, compiled for any number
of states. It answers as the dense head does, within the rounding of float32.

Symbols: h hidden state `[..., d]`, W weight `[V, d]`, z logits `[..., V]`.
"""

from typing import Any

import torch
from torch import Tensor

from lmhead.errors import UnsupportedModel
from lmhead.head.base import Head
from lmhead.head.dense import LMHead
from lmhead.models.max_runtime import compile_graph, require_max
from lmhead.progress import Progress, silent

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MaxHead(Head):
    """A dense head on MAX, for inference on the CPU; made by `MaxHead.from_head`.

    MAX computes in float32. It reads a float32 weight where it lies, so that the two heads share
    it; of another dtype it has a copy.
    """

    reads_all = True

    def __init__(self, dense: LMHead, progress: Progress = silent) -> None:
        require_max()
        W, V, d = dense.weight.detach(), dense.vocab_size, dense.hidden_size
        if W.dtype not in _DTYPES or W.device.type != "cpu":
            raise UnsupportedModel(
                f"the head's weight is {W.dtype} on {W.device}; a MAX head takes float32, bfloat16 "
                "or float16 on the cpu: convert it, or use the dense head"
            )
        self.dense = dense
        self._dtype = dense.logits_dtype or W.dtype
        weights = {"linear.weight": W[:V].float()}
        if dense.bias is not None:
            weights["linear.bias"] = dense.bias.detach()[:V].float()
        self._project = compile_graph(
            lambda: _projection(dense), (("float32", ["N", d]),), weights, "the head", progress
        )

    @classmethod
    def from_head(cls, head: LMHead, *, progress: Progress = silent) -> "MaxHead":
        """Compile a dense head: minutes the first time, seconds afterwards."""
        return cls(head, progress)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.dense.vocab_size

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        return self.dense.hidden_size

    @property
    def sha256(self) -> str:
        """What the projection is, as one hexadecimal number: that of the dense head."""
        return self.dense.sha256

    @torch.no_grad()
    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`, without gradients."""
        h = self.dense.entering(h, from_block=from_block)
        # rounded as the dense head does, then computed in float32
        rows = h.to(self.dense.weight.dtype).float().reshape(-1, self.hidden_size)  # [N, d]
        z: Tensor = self._project(rows)  # [N, V]
        return z.to(self._dtype).view(*h.shape[:-1], self.vocab_size)

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens, logits `[..., n]`: the dense head does, from those rows."""
        return self.dense.score(h, ids, from_block=from_block)

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets [...]`, with gradients: the dense head's."""
        return self.dense.loss(h, targets, from_block=from_block, **options)

    def __repr__(self) -> str:
        return f"MaxHead({self.dense!r})"


def _projection(dense: LMHead) -> Any:
    """Build the graph from h [N, d] to z [N, V]."""
    from max.experimental import functional as F
    from max.experimental.nn import Linear, Module

    class Projection(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            bias = dense.bias is not None
            self.linear = Linear(dense.hidden_size, dense.vocab_size, bias=bias)

        def forward(self, h: Any) -> Any:
            z = self.linear(h)
            if dense.scale is not None:
                z = z / dense.scale.by if dense.scale.divide else z * dense.scale.by
            if dense.softcap is not None:
                z = F.tanh(z / dense.softcap) * dense.softcap
            return z

    return Projection()
