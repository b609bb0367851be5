"""Vectors for the page: those named on the command line, uploaded ones, and two words' difference.

Symbols: W `[V, d]`, v direction `[d]`, alpha its strength, z logits `[V]`.
"""

import base64
import hashlib
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer import (
    HEAD,
    Guard,
    SteeringVector,
    SteeringWarning,
    certify,
    guard,
    load_vectors,
    steer_model,
    steering_for,
)
from lmhead.steer.bound.steering import Added, additions, torch_body
from lmhead.steer.measure import kl_of
from lmhead.steer.vector import Card

LARGEST = 64 << 20  # bytes of an uploaded file
_REACH = 8.0  # logits: what the largest alpha of the slider does to a vector at the head
_KEPT = 32  # uploaded files
_SEEN = 1 << 14  # rows of W that tell how rows spread


class Vectors:
    """The vectors that can be chosen, by name or by the SHA-256 of their file."""

    def __init__(self, model: Model, files: Sequence[Path] = ()) -> None:
        self.model = model
        self._named: dict[str, tuple[str, list[SteeringVector]]] = {}
        self._lock = threading.Lock()
        self._rows: tuple[Tensor, Tensor] | None = None  # their mean, and how they spread
        self._reaches: dict[bytes, float] = {}  # by direction
        for path in files:
            self.add(path.name, path.read_bytes())

    def add(self, name: str, content: bytes) -> dict[str, Any]:
        """Take the bytes of a `.safetensors` or `.gguf` file; tell what they hold."""
        suffix = Path(name).suffix.lower()
        if suffix not in (".safetensors", ".gguf"):
            raise BadInput(f"the file is {Path(name).name}; expected .safetensors or .gguf")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"vector{suffix}"
            path.write_bytes(content)
            vectors = load_vectors(path)
        additions(torch_body(self.model), vectors)  # layers and widths must be this model's
        key = hashlib.sha256(content).hexdigest()[:16]
        with self._lock:
            self._named.pop(key, None)
            self._named[key] = (Path(name).name, vectors)
            while len(self._named) > _KEPT:
                self._named.pop(next(iter(self._named)))
        return self._described(key)

    def listed(self) -> list[dict[str, Any]]:
        """Describe every vector."""
        return [self._described(key) for key in list(self._named)]

    def _described(self, key: str) -> dict[str, Any]:
        name, vectors = self._named[key]
        first = vectors[0]
        return {
            "id": key,
            "name": name,
            "layers": [v.layer for v in vectors],
            "alpha": first.alpha,
            "job": first.card.job,
            "reach": self._reach(vectors),
        }

    def _reach(self, vectors: Sequence[SteeringVector]) -> float:
        """Return the largest alpha that the slider offers."""
        if any(v.layer != HEAD for v in vectors):
            return 4 * abs(vectors[0].alpha)
        key = vectors[0].direction.numpy().tobytes()
        if key not in self._reaches:
            r = certify(self.model, vectors[0], alpha=1.0).range
            while len(self._reaches) >= _KEPT:
                self._reaches.pop(next(iter(self._reaches)))
            self._reaches[key] = _REACH / r if r > 0 else 1.0
        return self._reaches[key]

    def find(self, chosen: dict[str, Any]) -> list[SteeringVector]:
        """Return the vectors that are meant: `{"file": id}`, or `{"raise": id, "lower": id}`."""
        if "file" in chosen:
            with self._lock:
                if chosen["file"] not in self._named:
                    raise BadInput(
                        "the server does not know this vector; it was uploaded before the server "
                        "was started: choose its file again"
                    )
                return self._named[chosen["file"]][1]
        return [self._words(chosen.get("raise"), chosen.get("lower"))]

    def _words(self, up: Any, down: Any) -> SteeringVector:
        """Make the direction from one row of W to another; without one, away from all of them.

        Rows share much of what they are, so the way from their mean to one of them raises what is
        frequent. Divided by how the rows spread, it raises that one more than any other.
        """
        V = self.model.reachable
        for token in (up, down):
            if token is not None and not (isinstance(token, int) and 0 <= token < V):
                raise BadInput(f"the token is {token!r}; expected an id from 0 to {V - 1}")
        if up is None:
            raise BadInput("no token is chosen; choose one to raise")
        W = self.model.head.weight.detach()
        if down is None:
            mean, spread = self._rows = self._rows or _spread(W[:V])
            v = torch.linalg.solve(spread, W[up].float() - mean)
        else:
            v = W[up].float() - W[down].float()
        if not bool(v.any()):
            raise BadInput("the two tokens are the same; choose another one to lower")
        return SteeringVector(v / v.norm(), HEAD, 1.0, Card(model=self.model.name))

    def steered(
        self, h: Tensor, ids: Sequence[int], chosen: dict[str, Any], alpha: float,
        kl_cap: float | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the steered logits `[reachable]`, and what is known of them beforehand."""
        vectors = self.find(chosen)
        found: dict[str, Any] = {
            "layers": [v.layer for v in vectors],
            "reach": self._reach(vectors),
            "certificate": None,
            "strength": 1.0,
        }
        V = self.model.reachable
        with torch.inference_mode(), noted() as notes:
            plain = self.model.head(h)[:V].float()
            if alpha == 0:
                z = plain
            elif kl_cap is not None:
                held = guard(self.model, vectors, kl_cap, alpha=alpha)
                z = held.head(held.model.last_hidden(list(ids)))[:V]
                found["strength"] = held.log.strength[-1]
            else:
                own = steer_model(self.model, vectors, alpha)
                z = own.head(own.last_hidden(list(ids)))[:V].float()
            if alpha != 0 and len(vectors) == 1 and vectors[0].layer == HEAD:
                found["certificate"] = _certificate(self.model, vectors[0], alpha)
            found["kl"] = float(kl_of(plain[None].double(), z[None].double()).clamp(min=0)[0])
        found["notes"] = notes
        found["logits"] = base64.b64encode(z.float().cpu().numpy().tobytes()).decode()
        return found

    def steering(
        self, chosen: dict[str, Any], alpha: float, kl_cap: float | None
    ) -> "Guard | Added | None":
        """Return what steers one request of the generation engine."""
        vectors = self.find(chosen)
        if alpha == 0:
            return None
        with noted():
            return steering_for(self.model, vectors, kl_cap, alpha=alpha).alone()


def _spread(W: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean `[d]` of rows `[V, d]`, and their covariance `[d, d]`, made invertible."""
    some = W[:: -(-len(W) // _SEEN)].float()
    mean = some.mean(0)
    off = some - mean
    C = off.T @ off / len(some)
    return mean, C + 0.01 * C.diagonal().mean() * torch.eye(len(C), device=C.device)


def _certificate(model: Model, vector: SteeringVector, alpha: float) -> dict[str, Any]:
    proved = certify(model, replace(vector, card=Card()), alpha=alpha).to_dict()
    return {name: proved[name] for name in ("range", "kl_bound", "tv_bound")}


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect what the steering code warns of."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SteeringWarning)
        yield notes
    notes += [str(w.message) for w in caught if issubclass(w.category, SteeringWarning)]
