"""A head by itself on disk: `head.safetensors` and `head.json`, in their own folder.

The JSON file holds everything that is not a tensor: scale, softcap, sizes, and how the norm is
built. A norm is any module of torch, transformers or lmhead made of plain settings, parameters and
other such modules; it is rebuilt without running its constructor, so that it computes the same
bits. Nothing is pickled.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files.jsons import read_json
from lmhead.files.safetensors import open_safetensors
from lmhead.files.whole import folder_whole
from lmhead.head.projection import Projection
from lmhead.head.steps import Scale
from lmhead.models.reading import first_line

ABOUT = "head.json"
TENSORS = "head.safetensors"
P = TypeVar("P", bound=Projection)
_FORMAT = "lmhead-head-1"
_ROOMS = ("torch.nn.modules.", "transformers.models.", "lmhead.head.")
_FACTS = ("vocab_size", "state_size", "softcap", "tied")
_INNER = frozenset(vars(nn.Module()))  # what torch itself keeps in a module


def is_head(folder: Path) -> bool:
    """Tell whether a folder holds a head alone."""
    return (folder / ABOUT).is_file() and not (folder / "config.json").exists()


def save_head(head: Projection, folder: Path, *, force: bool = False) -> None:
    """Write a head to a folder, which is either whole or not there at all."""
    tensors = {"weight": head.weight, "bias": head.bias}
    about: dict[str, Any] = {
        "format": _FORMAT,
        "sha256": head.sha256,
        **{name: getattr(head, name) for name in _FACTS},
        "scale": head.scale and [head.scale.by, head.scale.divide],
        "logits_dtype": head.logits_dtype and _name(head.logits_dtype),
        "norm": None if head.norm is None else _described(head.norm, "norm", tensors),
    }
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
    with folder_whole(folder, force=force) as staging:
        (staging / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        mode = (staging / ABOUT).stat().st_mode
        try:
            save_file(kept, staging / TENSORS, {"format": "pt"})
        except SafetensorError as error:  # a full disk, as that library tells it
            raise OSError(str(error)) from error
        (staging / TENSORS).chmod(mode)  # the library writes for the owner alone


def load_head(folder: Path, make: type[P]) -> P:
    """Read what `save_head` wrote."""
    about = read_json(folder / ABOUT)
    if about.get("format") != _FORMAT:
        raise BadCheckpoint(
            f"{folder / ABOUT} says format {about.get('format')!r}; expected {_FORMAT!r}, as "
            "head.save_pretrained writes it"
        )
    try:
        open_safetensors(folder / TENSORS)  # no pipe, no false header
        tensors = load_file(folder / TENSORS)
        weight, bias = (_parameter(tensors.get(name)) for name in ("weight", "bias"))
        by = about["scale"]
        head = make(
            weight,
            bias,
            None if about["norm"] is None else _built(about["norm"], "norm", tensors),
            about["softcap"],
            None if by is None else Scale(float(by[0]), bool(by[1])),
            bool(about["tied"]),
            logits_dtype=about["logits_dtype"] and _dtype(about["logits_dtype"]),
            vocab_size=about["vocab_size"],
            state_size=about["state_size"],
        )
    except Exception as error:  # whatever its values lead to
        raise BadCheckpoint(
            f"the head in {folder} is damaged ({type(error).__name__}: {first_line(error)}); "
            "save it again"
        ) from error
    head.require_finite()
    return head


def _described(module: nn.Module, path: str, tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Say how a module is built, and put its tensors, named by their path, to the others."""
    kind = type(module)
    if not kind.__module__.startswith(_ROOMS) or _class(kind.__module__, kind.__name__) is not kind:
        raise UnsupportedModel(
            f"the head's {path} is a {kind.__module__}.{kind.__qualname__}; expected a module of "
            "torch or transformers: set head.norm to None to save the projection alone"
        )
    own = {**module._parameters, **module._buffers}
    tensors |= {f"{path}.{name}": t for name, t in own.items() if t is not None}
    settings = {name: value for name, value in vars(module).items() if name not in _INNER}
    return {
        "module": kind.__module__,
        "class": kind.__name__,
        "settings": {name: _plain(value, f"{path}.{name}") for name, value in settings.items()},
        "parameters": list(module._parameters),
        "buffers": list(module._buffers),
        "modules": {
            name: part if part is None else _described(part, f"{path}.{name}", tensors)
            for name, part in module._modules.items()
        },
    }


def _built(about: dict[str, Any], path: str, tensors: dict[str, Tensor]) -> nn.Module:
    """Put a module together again; its constructor does not run."""
    kind = _class(about["module"], about["class"])
    if not about["module"].startswith(_ROOMS) or not issubclass(kind, nn.Module):
        raise ValueError(
            f"{about['module']}.{about['class']} is not a module of torch or transformers"
        )
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in about["parameters"]:
        module.register_parameter(name, _parameter(tensors.get(f"{path}.{name}")))
    for name in about["buffers"]:
        module.register_buffer(name, tensors.get(f"{path}.{name}"))
    for name, part in about["modules"].items():
        module.add_module(name, part and _built(part, f"{path}.{name}", tensors))
    for name, value in about["settings"].items():
        if name.startswith("__") or name in _INNER:
            raise ValueError(f"{name} is not a setting")
        setattr(module, name, _value(value))
    return module.eval()


def _class(module: str, name: str) -> Any:
    if not module.startswith(_ROOMS):
        return None
    return getattr(import_module(module), name, None)


def _parameter(tensor: Tensor | None) -> Any:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def _plain(value: Any, path: str) -> Any:
    """Give a setting as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, tuple | list):
        parts = [_plain(part, path) for part in value]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(part, path) for key, part in value.items()}}
    raise UnsupportedModel(
        f"the head's {path} is a {type(value).__name__}, which a file cannot hold; set head.norm "
        "to None to save the projection alone"
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "dtype":
        return _dtype(inner)
    if kind == "tuple":
        return tuple(map(_value, inner))
    return {key: _value(part) for key, part in inner.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype
