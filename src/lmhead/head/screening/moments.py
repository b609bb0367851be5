"""Mean and deviation of all V scores of a state, without computing them.

z_i = W_i . h + bias_i, so the sum of the z_i is (sum of the W_i) . h + the sum of the biases, and
the sum of their squares is h G h + 2 (W' bias) . h + |bias|^2 with the Gram matrix G = W' W,
`[d, d]`. All in float64; G is made when it is first needed.
"""

import torch
from torch import Tensor

from lmhead.head.screening.bounds import Float32, Float64

_TOGETHER = 4096


class Moments:
    """The sums over the first V rows of a weight `[>= V, d]` and its bias `[V]`, or empty."""

    def __init__(self, weight: Tensor, bias: Float64, V: int) -> None:
        d = weight.shape[1]
        self.gram = torch.zeros(d, d, dtype=torch.float64)
        self.rows = torch.zeros(d, dtype=torch.float64)
        self.cross = torch.zeros(d, dtype=torch.float64)
        b = torch.from_numpy(bias[:V]) if bias.size else torch.zeros(0, dtype=torch.float64)
        self.bias, self.bias_squares = float(b.sum()), float(b.square().sum())
        for at in range(0, V, _TOGETHER):
            W = weight[at : min(at + _TOGETHER, V)].double()
            self.gram.addmm_(W.T, W)
            self.rows += W.sum(0)
            if bias.size:
                self.cross += W.T @ b[at : at + len(W)]

    def of(self, h: Float32) -> tuple[float, float]:
        """Give the sum of the scores of a state `[d]`, and the sum of their squares."""
        x = torch.from_numpy(h).double()
        total = float(self.rows @ x) + self.bias
        squares = float(x @ (self.gram @ x) + 2 * (self.cross @ x)) + self.bias_squares
        return total, squares
