"""LMHead: the dense engine, taken from a model, from its files, or from a folder of its own.

What it computes is in `projection.py`; here is where it comes from.
"""

from pathlib import Path
from typing import Any

from torch import nn

from lmhead.errors import BadInput
from lmhead.head.find.locate import locate
from lmhead.head.find.pretrained import read_head
from lmhead.head.projection import Projection
from lmhead.head.saved import is_head, load_head, save_head
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent


class LMHead(Projection):
    """The last layer of a language model: final norm, projection, scale and softcap.

    - `weight [V, d]`, `bias [V]`: the projection. They are never copied; if they come from a model,
      they remain its parameters.
    - `norm`: the module between the last block and the projection, usually a LayerNorm or RMSNorm;
      if a model does more there, all of it.
    - `scale`: a number that multiplies the logits, or `Scale(x, divide=True)`.
    - `softcap`: c in `c * tanh(z / c)`, applied last.
    - `tied`: the weight is the input embedding.
    - `logits_dtype`: the dtype that the logits are cast to right after the projection, if the model
      does that.
    - `vocab_size`: how many logits the model keeps, if it cuts off those of padding rows. All rows
      stay in the weight.
    - `state_size`: the width of what enters the norm, if a projection inside makes it differ.
    """

    @classmethod
    def from_model(cls, model: nn.Module, **inputs: Any) -> "LMHead":
        """Take the head of a Hugging Face causal language model, sharing its parameters.

        The head is found by watching the model work on two tokens. `inputs` replaces the
        arguments of that trial run for a model that needs more than `input_ids`.
        """
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"the model is a {type(model).__name__}; expected a causal language model of "
                "transformers, in memory: LMHead.from_pretrained takes a name or a folder"
            )
        head = locate(model, cls, **inputs).head
        head.require_finite()
        return head

    @classmethod
    def from_pretrained(cls, model: str | Path, progress: Progress = silent) -> "LMHead":
        """Read the head, and nothing else, of a folder, `.gguf` file, built-in name or hub id.

        The folder may also be one that `save_pretrained` wrote, with only a head.

        The tensors are memory-mapped if they are stored in the dtype that the model is to have;
        they do not require gradients until `requires_grad_()` is called.
        """
        if not isinstance(model, str | Path):
            raise BadInput(
                f"the model is a {type(model).__name__}; expected a folder, a .gguf file or a "
                "name: LMHead.from_model takes one that is in memory"
            )
        if is_head(Path(model)):
            return load_head(Path(model), cls)
        head = read_head(resolve(model, progress), cls)
        head.require_finite()
        return head

    def save_pretrained(self, folder: str | Path, *, force: bool = False) -> None:
        """Write just the head to a folder, for `LMHead.from_pretrained`.

        `force` replaces a folder that was written so before.
        """
        save_head(self, Path(folder), force=force)
