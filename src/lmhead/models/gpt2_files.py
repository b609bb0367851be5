"""GPT-2 on the disk: Hugging Face's checkpoints, read and written.

Two things differ from the model in gpt2.py. Hugging Face stores the four products of a block as
[in, out], the transpose of a torch Linear. And a tied head is not stored: it is the embedding.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from lmhead.errors import BadCheckpoint
from lmhead.files.checkpoint import Checkpoint
from lmhead.files.whole import written_whole
from lmhead.progress import Progress


def write_files(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors, as transformers reads them.

    Each file appears whole or not at all; an older one stays until the new one is complete.
    """
    tensors = {
        name: (p.detach().T if _is_transposed(name) else p.detach()).contiguous()
        for name, p in model.named_parameters()  # a tied weight comes once, as wte
    }
    dtype = next(iter(tensors.values())).dtype
    about = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": str(dtype).removeprefix("torch."),
    }
    with written_whole(folder / "model.safetensors", force=True) as weights:
        save_file(tensors, weights, metadata={"format": "pt"})
    with written_whole(folder / "config.json", force=True) as file:
        file.write_text(json.dumps({**about, **config}, indent=2) + "\n")


def _is_transposed(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def read_tensors(
    model: nn.Module, checkpoint: Checkpoint, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter from the checkpoint; refuse one that is not of the model's shape.

    What else the file holds (the oldest ones store causal masks as `attn.bias`) is not read.
    """
    files = {  # the oldest files also lack the prefix
        n if n.startswith("lm_head.") else f"transformer.{n.removeprefix('transformer.')}": n
        for n in checkpoint.tensors
    }
    wanted = dict(model.named_parameters())
    if missing := sorted(wanted.keys() - files.keys()):
        raise BadCheckpoint(
            f"{checkpoint.folder} lacks {len(missing)} of the {len(wanted)} tensors of its GPT-2 "
            f"({missing[0]}, ...); expected all that its config.json describes"
        )
    with progress("reading weights", total=len(wanted)) as advance:
        for name, p in wanted.items():
            tensor = checkpoint.read(files[name])
            tensor = tensor.T.contiguous() if _is_transposed(name) else tensor
            if tensor.shape != p.shape:
                raise BadCheckpoint(
                    f"{files[name]} in {checkpoint.folder} has shape {list(tensor.shape)}; "
                    f"expected {list(p.shape)} by its config.json: fetch the folder again"
                )
            advance(1)
            yield name, tensor
