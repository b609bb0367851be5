"""Modular MAX, the optional second engine: how a graph is compiled and run on torch's tensors.

MAX comes with the extra `max`, under a licence of its own. It is imported only when it is used.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import MissingExtra, how_to_install
from lmhead.progress import Progress, silent

# What the metadata of the package says of its licence.
_LICENCE = "LicenseRef-MAX-Platform-Software-License"


def missing_max() -> MissingExtra:
    """Say how to install MAX, and under which licence it comes."""
    return MissingExtra(
        f"Modular MAX is not installed; install it with: {how_to_install('max')} "
        f"(it is under Modular's own, proprietary licence: {_LICENCE})"
    )


def require_max() -> None:
    """Raise MissingExtra where MAX is not installed."""
    try:
        import max.experimental.nn  # noqa: F401
    except ImportError as error:
        raise missing_max() from error


def compile_graph(
    build: Callable[[], Any],
    inputs: tuple[Any, ...],
    weights: Mapping[str, Tensor],
    name: str,
    progress: Progress = silent,
) -> Callable[..., Any]:
    """Compile the module that `build` makes; return a function of torch tensors.

    - `inputs`: for every argument its dtype ("float32", "int64") and its shape, where a name
      stands for a size that is known only when the graph runs; or a list of such.
    - `weights`: the parameters by name. They are not copied: MAX reads torch's memory.

    MAX keeps what it compiles on disk; only the first time takes minutes.
    """
    require_max()
    from max.driver import CPU, Buffer
    from max.dtype import DType
    from max.experimental import functional as F
    from max.experimental.tensor import default_device, default_dtype
    from max.graph import TensorType

    def typed(given: Any) -> Any:
        if isinstance(given, list):
            return [typed(one) for one in given]
        dtype, shape = given
        return TensorType(DType[dtype], shape, CPU())

    def to_max(given: Any) -> Any:
        if isinstance(given, list):
            return [to_max(one) for one in given]
        return Buffer.from_dlpack(given.detach().contiguous())

    def to_torch(got: Any) -> Any:
        if isinstance(got, list | tuple):
            return type(got)(to_torch(one) for one in got)
        return torch.utils.dlpack.from_dlpack(got)

    # Lazy: the module's own first weights are never computed, for which MAX would take minutes.
    with F.lazy(), default_device(CPU()), default_dtype(DType.float32):
        module = build()
    title = f"compiling {name} for MAX (minutes the first time, then from its cache)"
    with progress(title, total=None):
        run = module.compile(
            *map(typed, inputs),
            weights={key: p.detach().contiguous() for key, p in weights.items()},
            name=type(module).__name__,
        )

    _restore_environment()

    def call(*tensors: Any) -> Any:
        return to_torch(run(*map(to_max, tensors)))

    return call


def _restore_environment() -> None:
    """Take back what MAX does to the process's environment behind Python's back.

    It points PYTHONEXECUTABLE and PYTHONPATH elsewhere, so that every Python that this process
    starts afterwards misses its virtual environment.
    """
    for name in ("PYTHONEXECUTABLE", "PYTHONPATH"):
        if name in os.environ:
            os.putenv(name, os.environ[name])
        else:
            os.unsetenv(name)
