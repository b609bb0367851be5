"""Fixtures that more than one room needs: the real models, tiny ones, and the command line."""

import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread per worker: threads that wait for each other on busy cores take many times longer.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a hub

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lmhead.files.cache import cache_root
from lmhead.models.fetch import folder_of, is_here, pull
from lmhead.models.registry import BUILT_IN


def use_a_cache_of_our_own() -> None:
    """Share only the models with the user's cache: what tests leave would push out what is theirs.

    It lies beside the user's, because folders are renamed into place, which no disk can do to
    another. Workers are started later and get the same one.
    """
    models = cache_root() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lmhead-tests-", dir=cache_root().parent))
    (folder / "models").symlink_to(models.absolute())
    os.environ["LMHEAD_CACHE"] = str(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


if "PYTEST_XDIST_WORKER" not in os.environ:
    use_a_cache_of_our_own()
settings.register_profile("lmhead", deadline=None)  # the first example may have to compile
settings.load_profile("lmhead")
sys.path.append(str(Path(__file__).parent))  # for what several rooms import


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real smollm2-135m as a Hugging Face folder."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Path) -> Path:
    """The GGUF file that smollm2-135m was converted from."""
    return smollm2 / BUILT_IN["smollm2-135m"].gguf


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The real gemma3-270m, where its terms were accepted and it was pulled."""
    if not is_here("gemma3-270m"):
        pytest.skip("gemma3-270m is not in the cache; `make test-all` fetches it")
    return folder_of("gemma3-270m")


@pytest.fixture(scope="session")
def gemma3_gguf(gemma3: Path) -> Path:
    """The GGUF file that gemma3-270m was converted from."""
    return gemma3 / BUILT_IN["gemma3-270m"].gguf


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Return a function that builds a tiny random causal language model of a model type."""
    from tiny_models import build

    return build


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """Return a function that makes a tiny configuration of a model type."""
    from tiny_models import config_of

    return config_of
