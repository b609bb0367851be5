"""Converting a head without converting the model whose tensors it shares.

torch's `module.to(...)` changes parameters in place, and those of a head are those of a model. Here
what has to change is replaced: the head gets tensors of its own, and the model stays as it is. As a
part of a larger module, which converts all its parts, a head is converted in place like any other.
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from lmhead.errors import BadInput


class OwnTensors(nn.Module):
    """A module whose conversions leave alone the tensors that it shares with others."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert to a dtype or move to a device, as `nn.Module.to` does, but to own tensors.

        Where nothing has to change, nothing does: the tensors stay the shared ones.
        """

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(*args, **kwargs)

        probe = convert(torch.empty(0))
        if not probe.is_floating_point():
            raise BadInput(f"a head cannot become {probe.dtype}; expected a floating point type")
        for name, part in self._modules.items():
            if part is not None and any(
                t.is_floating_point() and convert(t) is not t
                for t in (*part.parameters(), *part.buffers())
            ):
                own = part if isinstance(part, OwnTensors) else copy.deepcopy(part)
                self._modules[name] = own.to(*args, **kwargs)
        for name, tensor in self._parameters.items():
            if tensor is not None and convert(tensor) is not tensor:
                new = convert(tensor.detach())
                self._parameters[name] = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                floating = buffer.is_floating_point()
                self._buffers[name] = convert(buffer) if floating else buffer.to(probe.device)
        return self

    def float(self) -> Self:
        """Convert to float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Convert to float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """Convert to float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Convert to bfloat16."""
        return self.to(torch.bfloat16)

    def cpu(self) -> Self:
        """Move to the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Move to a GPU."""
        return self.to("cuda" if device is None else device)
