"""What steering vectors add to a model's states, layer by layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from lmhead.body import HEAD, TorchBody
from lmhead.body.adding import blocks_of, check_layer
from lmhead.errors import BadInput
from lmhead.steer.vector import SteeringVector


def steering(body: TorchBody, vectors: Sequence[SteeringVector]) -> dict[int | str, Tensor]:
    """Sum what is added at every layer, `[d]` each; check layers and widths."""
    total: dict[int | str, Tensor] = {}
    blocks = blocks_of(body.model) if any(v.layer != HEAD for v in vectors) else nn.ModuleList()
    for vector in vectors:
        check_layer(vector.layer, blocks)
        width = _width(body, vector.layer)
        if vector.size != width:
            raise BadInput(
                f"the vector has width {vector.size}, but the model's states at layer "
                f"{vector.layer} have {width}; expected a vector made for this model"
            )
        total[vector.layer] = total.get(vector.layer, 0) + vector.added
    return total


def _width(body: TorchBody, layer: int | str) -> int:
    if layer == HEAD:
        return int(body.model.get_output_embeddings().weight.shape[1])
    return int(body.config.hidden_size)
