import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from lmhead.loading import Model, load
from lmhead.steer import SteeringVector

sys.path.append(str(Path(__file__).parent))  # for serving.py

if TYPE_CHECKING:
    from serving import Live


@pytest.fixture(scope="session")
def tiny_served(smollm2: Path, tiny: Callable[..., Any]) -> Model:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    network = tiny(
        "llama", vocab_size=49152, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2
    )
    with torch.no_grad():  # logits far enough apart that rounding in a batch changes no choice
        network.get_output_embeddings().weight.mul_(8)
    return load(network, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def vectors_folder(tiny_served: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    d = tiny_served.head.hidden_size
    for i, layer in enumerate(("head", 0, 1, 0)):
        direction = torch.randn(d, generator=torch.Generator().manual_seed(i))
        SteeringVector(direction, layer, 1.0).save(folder / f"v{i}.safetensors")
    return folder


@pytest.fixture(scope="session")
def live(tiny_served: Model, vectors_folder: Path) -> "Iterator[Live]":
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from serving import Settings, serving

    with serving(tiny_served, Settings(vectors=vectors_folder, drain=5)) as running:
        yield running
