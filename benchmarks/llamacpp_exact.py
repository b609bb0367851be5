"""How far h of the llama.cpp body is from that of transformers, and where the texts part.

    python benchmarks/llamacpp_exact.py [--model MODEL] [--prompts 20] [--tokens 64] [--json]

The same GGUF file twice: as it is stored, and with every tensor dequantised to float32, where
llama.cpp has nothing to round. For each, over the positions of greedy texts of transformers: the
cosine of h, the largest difference of the logits, the steps at which the best token is another,
and how many of these the difference of the logits does not explain (there must be none). Then the
logits under a vector at every fifth block, in both bodies, on the float32 file.
"""

import argparse
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lmhead.body.llama.library import is_installed
from lmhead.files.gguf import open_gguf, pack_string
from lmhead.generation import generate
from lmhead.loading import Model, load
from lmhead.models.fetch import gguf_of
from lmhead.steer import SteeringVector, steer_model

PROMPTS = (
    "The capital of France is", "Once upon a time there was", "The three laws of motion are",
    "To bake a good bread you need", "In 1969 the first men", "A compiler is a program that",
    "The river flows through the old town", "Every morning the old man went",
    "def fibonacci(n):\n    ", "Water boils at", "My favourite season is", "The largest planet is",
    "She opened the letter and", "The law of supply and demand", "A good night's sleep",
    "The first computer was", "Music is a language", "The history of Rome begins",
    "In the deep sea there are", "When the rain stopped, the children",
)  # fmt: skip


def as_float32(source: Path, target: Path) -> Path:
    """Write a GGUF file with all of its tensors in float32."""
    file = open_gguf(source)
    with target.open("wb") as out:
        counts = len(file.tensors), len(file.keys)
        out.write(b"GGUF" + struct.pack("<IQQ", file.version, *counts))
        for key in file.keys.values():
            out.write(pack_string(key.name) + struct.pack("<I", key.kind) + file.raw(key))
        end = 0
        for tensor in file.tensors.values():
            shape = tensor.shape
            out.write(pack_string(tensor.name) + struct.pack("<I", len(shape)))
            out.write(struct.pack(f"<{len(shape)}QIQ", *shape[::-1], 0, end))
            end += -(-4 * tensor.size // file.alignment) * file.alignment
        out.write(b"\0" * (-out.tell() % file.alignment))
        for name in file.tensors:
            for piece in file.stream(name):
                out.write(piece.astype("<f4").data)
            out.write(b"\0" * (-out.tell() % file.alignment))
    return target


@torch.inference_mode()
def compare(fast: Model, slow: Model, texts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Compare two bodies along the greedy texts of the second: what it says after each prompt."""
    cosines, largest, parted, unexplained, steps, whole = [], 0.0, 0, 0, 0, 0
    for text, made in texts.items():
        ids = slow.encode(text)
        read = torch.tensor([[*ids, *made[:-1]]])
        h, wanted = fast.body(read, use_cache=False)[0][0], slow.body(read, use_cache=False)[0][0]
        cosines.append(torch.cosine_similarity(h, wanted, dim=-1))
        y, z = fast.head(h[len(ids) - 1 :]), slow.head(wanted[len(ids) - 1 :])  # [tokens, V]
        y, z = y[:, : slow.reachable], z[:, : slow.reachable]
        ours, theirs = y.argmax(-1), z.argmax(-1)
        off = (y - z).abs()
        largest = max(largest, float(off.max()))
        steps += len(made)
        for t in (ours != theirs).nonzero().flatten().tolist():
            parted += 1
            a, b = int(ours[t]), int(theirs[t])
            unexplained += float(z[t, b] - z[t, a]) > float(off[t, a] + off[t, b])
        whole += generate(text, fast, max_tokens=len(made))[0].ids == made
    every = torch.cat(cosines)
    return {
        "positions": len(every), "lowest_cosine": float(every.min()),
        "mean_cosine": float(every.mean()), "largest_logit_difference": largest,
        "steps": steps, "other_best_token": parted, "unexplained": unexplained,
        "texts": len(texts), "same_texts": whole,
    }  # fmt: skip


@torch.inference_mode()
def steered(fast: Model, slow: Model) -> dict[str, float]:
    """Return the largest difference of the logits under a vector at some blocks."""
    d, layers = fast.body.model.width, fast.body.model.layers
    v = torch.randn(d, generator=torch.Generator().manual_seed(0))
    reported = {}
    for layer in range(1, layers, 5):
        vector = SteeringVector(v / v.norm(), layer, 0.2 * float(d) ** 0.5)
        ids = slow.encode(PROMPTS[0])
        z = [
            m.head(m.last_hidden(ids))
            for m in (steer_model(slow, vector), steer_model(fast, vector))
        ]
        reported[str(layer)] = float((z[0] - z[1]).abs().max())
    return reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not is_installed():
        print("skipped: llama-cpp-python is not installed (extra llamacpp)")
        return
    file = Path(options.model)
    file = file if file.is_file() else gguf_of(options.model)
    slow = load(options.model, body="torch")
    texts = {
        text: generate(text, slow, max_tokens=options.tokens)[0].ids
        for text in PROMPTS[: options.prompts]
    }

    def tell(name: str, row: dict[str, Any]) -> None:
        shown = ", ".join(f"{k} {v:.6g}" for k, v in row.items())
        reported = json.dumps({"model": options.model, "file": name, **row})
        print(reported if options.json else f"{options.model}, {name}: {shown}", flush=True)

    tell("as stored", compare(load(options.model, body="llama.cpp"), slow, texts))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LMHEAD_CACHE"] = str(Path(folder) / "cache")  # what is kept of it goes with it
        exact = load(as_float32(file, Path(folder) / "float32.gguf"), body="llama.cpp")
        tell("in float32, steered", steered(exact, slow))
        tell("in float32", compare(exact, slow, texts))


if __name__ == "__main__":
    main()
