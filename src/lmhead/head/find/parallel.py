"""The head of a model whose layers are split over ranks: found in a twin that is whole.

A tensor-parallel model cannot be watched as others are, for what it computes is spread over ranks.
Its twin of the same configuration, on the meta device, has the same structure and no weights; what
is found there is looked up in the model by name.
"""

import copy
from typing import Any

import torch
from torch import nn

from lmhead.errors import UnsupportedModel
from lmhead.head.find.locate import Located, P, locate
from lmhead.loss.placed import is_placed


def is_parallel(model: nn.Module) -> bool:
    """Tell whether parameters of a model are split over ranks."""
    return any(is_placed(p) for p in model.parameters())


def located_parallel(model: nn.Module, make: type[P]) -> Located[P]:
    """Find the head of a tensor-parallel model; its weight is the model's own DTensor."""
    kind: Any = type(model)
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None or not hasattr(kind, "_from_config"):
        raise UnsupportedModel(
            f"{kind.__name__} is not a model of transformers; expected one that was loaded with a "
            "tensor parallel plan: or make a ShardedHead of the rows that are here"
        )
    if hasattr(config, "distributed_config"):
        config.distributed_config = None
    with torch.device("meta"):
        twin = kind._from_config(config, dtype=model.dtype)
    found = locate(twin.to("meta").eval(), make)
    names = {id(t): name for name, t in twin.state_dict(keep_vars=True).items()}
    real = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    head = found.head
    for path, tensor in [*head.named_parameters(), *head.named_buffers()]:
        name = names.get(id(tensor))
        if name not in real:
            raise UnsupportedModel(
                f"{kind.__name__} has no tensor {name} for the head's {path}; expected the model "
                "that its configuration describes"
            )
        owner, _, last = path.rpartition(".")
        setattr(head.get_submodule(owner), last, real[name])
    layer = model.get_submodule(found.layer_name)
    return Located(head, layer, found.layer_name, found.norm_names)
