"""A bound of a score is never below the score, and not far above it."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.bounds import BLOCK, build_screen

KERNELS = ["torch"] if find_spec("numba") is None else ["numba", "torch"]


@pytest.mark.parametrize("kernels", KERNELS)
def test_bounds_hold_for_states_made_to_break_them(kernels):
    """Along a row's residual Cauchy-Schwarz is an equality: what is left is the rounding alone."""
    weight = torch.randn(130, 48, generator=torch.Generator().manual_seed(0))
    head = LMHead(weight)
    screen = build_screen(weight, 130)
    q = screen.q[:130, :48].double() * screen.scale[:130, None].double()
    residual = weight.double() - q
    h = torch.cat([residual.float(), -residual.float(), weight, 1e9 * residual.float()])
    h = torch.cat([h, residual.float() * 1e-25 + weight * 1e-30])
    scanner = ScreenedHead(head, screen, kernels)._scanner
    for part in h.split(16):
        queries = scanner.read(part.numpy(), 130)
        upper = np.stack([query.upper for query in queries])
        peaks = np.stack([query.peaks for query in queries])
        z = part.double() @ weight.double().T
        assert bool((torch.from_numpy(upper[:, :130]).double() >= z).all())
        assert np.array_equal(peaks, upper.reshape(len(part), -1, BLOCK).max(-1))
        reached = torch.from_numpy(upper[:, :130]).double() - z
        # and they are not idle: at most twice what Cauchy-Schwarz gives, and some rounding
        size = part.double().norm(dim=1, keepdim=True)
        loose = 2.2 * size * screen.residual[:130].double() + 1e-3 * size
        assert bool((reached <= loose)[size[:, 0] > 1e-20].all())
