"""The steering vectors that a server knows, by name, and what they make of a request.

A vector comes from the folder that the server was given, or from an upload; a client names it and
nothing else. Everything here that touches the model is called in the worker's thread.
"""

import re
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.files.whole import written_whole
from lmhead.loading import Model
from lmhead.serve.api.errors import Refused
from lmhead.serve.api.schemas import SteerWith
from lmhead.steer.bound.certificate import certify
from lmhead.steer.bound.guarding import Guard, steering_for
from lmhead.steer.bound.steering import additions, steerable
from lmhead.steer.control import load_vectors
from lmhead.steer.vector import HEAD, SteeringVector

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEPT = 128  # steerings that are ready to use
SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True, eq=False)
class Known:
    """A vector, or those of one control vector, as this server has certified it."""

    name: str
    vectors: tuple[SteeringVector, ...]
    certificate: dict[str, Any] | None
    file: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        first = self.vectors[0]
        at_head = first.layer == HEAD
        note = None if at_head else "at a block nothing can be certified beforehand: give a kl_cap"
        return {
            "name": self.name,
            "layers": [v.layer for v in self.vectors],
            "alpha": [v.alpha for v in self.vectors],
            "width": first.size,
            "job": first.card.job,
            "budget": first.card.budget,
            "certificate": self.certificate,
            "note": note,
        }


@dataclass(frozen=True, eq=False)
class Steered:
    """The steering of a request: a guard to take copies of, and what was said about it."""

    guard: Guard
    asked: tuple[dict[str, Any], ...]
    budget: float | None
    kl_cap: float | None
    notes: tuple[str, ...]

    def alone(self) -> "Steered":
        """Return the same for one sequence; what it notes is its own."""
        return replace(self, guard=self.guard.alone())

    def report(self) -> dict[str, Any]:
        """Tell what it did to its sequence."""
        return {
            "vectors": list(self.asked),
            "budget": self.budget,
            "kl_cap": self.kl_cap,
            **self.guard.log.to_dict(),
            "strength": list(self.guard.log.strength),
            "notes": list(self.notes),
        }


class Vectors:
    """All vectors of a server."""

    def __init__(self, model: Model, folder: Path | None = None, most: int = 64) -> None:
        self.model, self.folder, self.most = model, folder, most
        self._known: dict[str, Known] = {}
        self._ready: OrderedDict[Any, Steered] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            for file in sorted(folder.iterdir()):
                if file.suffix in SUFFIXES and _NAME.fullmatch(file.stem):
                    self._add(self._certified(file.stem, file, file))

    def list(self) -> list[dict[str, Any]]:
        """Describe every vector."""
        with self._lock:
            return [self._known[name].to_dict() for name in sorted(self._known)]

    def get(self, name: str) -> Known:
        """Return a vector by its name."""
        with self._lock:
            if name in self._known:
                return self._known[name]
            names = ", ".join(sorted(self._known)) or "none"
        raise Refused(
            404,
            f"there is no steering vector {name[:64]!a}; this server has: {names}",
            param="steering",
            code="vector_not_found",
        )

    def upload(self, name: str, content: bytes) -> Known:
        """Take a vector from a client, certified for this model; refuse a name that is taken."""
        check_name(name)
        with self._lock:
            self._check_room(name)
        suffix = ".gguf" if content[:4] == b"GGUF" else ".safetensors"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"vector{suffix}"
            path.write_bytes(content)
            try:
                known = self._certified(name, path, None)
            except LMHeadError as error:  # its words name a file of ours
                said = str(error).replace(str(path), "the upload").replace(path.name, "the upload")
                raise Refused(400, said, param="body") from None
            except Exception:
                raise Refused(400, "the upload is not a vector that can be read") from None
        if self.folder is not None:
            target = self.folder / f"{name}{suffix}"
            with written_whole(target) as staging:
                staging.write_bytes(content)
            known = replace(known, file=target)
        return self._add(known)

    def delete(self, name: str) -> None:
        """Forget a vector, and remove its file."""
        known = self.get(name)
        with self._lock:
            self._known.pop(name, None)
            self._ready.clear()
        if known.file is not None:
            known.file.unlink(missing_ok=True)

    def steering(self, asked: Sequence[SteerWith]) -> Steered:
        """Make what steers a request; the smallest of the limits that are given holds for all."""
        chosen = []
        known = [self.get(one.name) for one in asked]
        for one, found in zip(asked, known, strict=True):
            if one.alpha is not None and one.alpha == 0:
                raise Refused(
                    400, "steering: alpha is 0; expected another number", param="steering"
                )
            chosen += [
                v if one.alpha is None else replace(v, alpha=one.alpha) for v in found.vectors
            ]
        caps = [one.kl_cap for one in asked if one.kl_cap is not None]
        budgets = [one.budget for one in asked if one.budget is not None]
        kl_cap, budget = min(caps, default=None), min(budgets, default=None)
        own = [v.card.budget for v in chosen if v.card.budget is not None]
        if budget is None and len(own) == len(chosen) and all(one.alpha is None for one in asked):
            budget = sum(own)  # what their cards promise holds; ranges add up at most
        key = (tuple((found, one.alpha) for found, one in zip(known, asked, strict=True)),
               kl_cap, budget)  # fmt: skip
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
                return self._ready[key]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = steering_for(self.model, chosen, kl_cap, budget)
        # Without a limit to keep at each token, a guard still tells the KL and the flips.
        guard = made if isinstance(made, Guard) else Guard(
            made.added, self.model.reachable, None, None
        )  # fmt: skip
        steered = Steered(
            guard,
            tuple(one.model_dump(include={"name", "alpha", "budget", "kl_cap"}) for one in asked),
            budget,
            kl_cap,
            tuple(str(one.message) for one in caught),
        )
        with self._lock:
            self._ready[key] = steered
            while len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return steered

    def _certified(self, name: str, path: Path, file: Path | None) -> Known:
        vectors = tuple(load_vectors(path))
        additions(steerable(self.model), vectors)  # layers and widths are the model's
        certificate = None
        if len(vectors) == 1 and vectors[0].layer == HEAD:
            if not vectors[0].direction.any():
                raise BadCheckpoint("the vector is 0 everywhere; expected a direction")
            certificate = certify(self.model, vectors[0]).to_dict()
        return Known(name, vectors, certificate, file)

    def _add(self, known: Known) -> Known:
        with self._lock:
            self._check_room(known.name)
            self._known[known.name] = known
        return known

    def _check_room(self, name: str) -> None:
        if name in self._known:
            raise Refused(
                409,
                "a vector with that name already exists; delete it first",
                param="name",
                code="taken",
            )
        if len(self._known) >= self.most:
            raise Refused(409, f"the server holds {self.most} vectors already; delete one first")


def check_name(name: str) -> None:
    """Refuse a name that is no plain word."""
    if not _NAME.fullmatch(name):
        raise Refused(
            400,
            "a vector's name has 1 to 64 letters, digits, dots, dashes or underscores, and begins "
            "with a letter or a digit",
            param="name",
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder of vectors that is not there, before a model is loaded."""
    if not folder.is_dir():
        raise BadInput(f"vectors is {folder}; expected a folder that exists", names=["vectors"])
