"""From a GGUF file to an ordinary Hugging Face folder, in float32.

The folder holds what `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`
read: configuration, weights, tokenizer with its chat template, generation settings. Tensors are
dequantised and written one at a time, so that memory never holds the model, and the large tensors,
which need no rearranging, in pieces.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint
from lmhead.files.gguf import GGUFFile, open_gguf
from lmhead.files.safetensors import pack_header
from lmhead.models.gguf_architectures import Move, plan_model
from lmhead.models.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from lmhead.progress import Progress, silent

# The tensors below and above the blocks, as GGUF calls them.
_ENDS = ("token_embd.", "output.", "output_norm.")


def convert_gguf(
    source: Path, target: Path, progress: Progress = silent, *, head_only: bool = False
) -> None:
    """Write the model of the GGUF file `source` into the existing empty folder `target`.

    `head_only` leaves out the weights of the blocks: the folder is for a model whose blocks are run
    by something else.
    """
    file = open_gguf(source)
    plan = plan_model(file)
    moves = [m for m in plan.moves if not head_only or m.source.startswith(_ENDS)]
    with progress("building the tokenizer"):
        tokenizer = build_tokenizer(file)
        ids, rows = tokenizer.tokenizer.get_vocab_size(), plan.config["vocab_size"]
        if ids > rows:
            raise BadCheckpoint(
                f"{source} has {ids:,} tokens but an embedding of {rows:,} rows; fetch it again"
            )
        tokenizer.tokenizer.save(str(target / "tokenizer.json"))

    names = {f"{name}_token_id": tokenizer.special.get(name) for name in ("bos", "eos", "pad")}
    _write_json(target / "config.json", plan.config | names)
    _write_json(target / "generation_config.json", _generation_config(tokenizer))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(tokenizer, plan.context))
    _write_weights(target / "model.safetensors", file, moves, progress)


def _tokenizer_config(tokenizer: GGUFTokenizer, context: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; those named after models rebuild parts.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # where a batch is to be continued on the right
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
    }
    for name in ("bos", "eos", "unk", "pad"):
        if (token := tokenizer.token(name)) is not None:
            config[f"{name}_token"] = token
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return config


def _generation_config(tokenizer: GGUFTokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        f"{name}_token_id": tokenizer.special[name]
        for name in ("bos", "pad")
        if name in tokenizer.special
    }
    if ends := tokenizer.end_ids:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_weights(path: Path, file: GGUFFile, moves: list[Move], progress: Progress) -> None:
    """Write a safetensors file tensor by tensor: all sizes are known before any data is read."""
    import numpy as np

    sizes = {move.target: ("F32", move.shape, 4 * prod(move.shape)) for move in moves}
    end = sum(nbytes for _, _, nbytes in sizes.values())
    with path.open("wb") as out, progress("converting the weights", total=end) as advance:
        out.write(pack_header(sizes, {"format": "pt"}))
        for move in moves:
            if move.change is None:
                pieces = file.stream(move.source)
            else:
                pieces = iter([move.change(file.read(move.source))])
            for piece in pieces:
                weights = np.ascontiguousarray(piece, dtype="<f4")
                out.write(weights.data)
                advance(weights.nbytes)
