"""A steering vector, its card, and the file they travel in.

Symbols: v direction `[d]`, alpha its strength; what is added to a hidden state is alpha * v.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lmhead.body import HEAD as HEAD
from lmhead.errors import BadCheckpoint, BadInput
from lmhead.files.jsons import open_file, parse_object
from lmhead.files.whole import written_whole

JOBS = ("detect", "steer")


class SteeringWarning(UserWarning):
    """Something about a vector that its user should know, and that is no error."""


@dataclass(frozen=True)
class Card:
    """What is known about a vector; it travels with it as JSON.

    - `job`: `detect` (added in a scoring pass only) or `steer` (added while text is generated).
    - `head_sha256`: the head that `certificate` was computed for.
    - `budget`: the largest range of delta, in logits, that the vector was made to keep.
    - `prototypes`: the two normalised means, truthful first, that a detector compares with.
    - `detector`: how a detector turns a state into a score; `lmhead.steer.judge.detector` reads it.
    - `data`: where the training rows came from, and the SHA-256 of each of them.
    - `metrics`: what was measured while training, on the split that is named there.
    """

    job: str = "steer"
    model: str | None = None
    head_sha256: str | None = None
    method: str | None = None
    budget: float | None = None
    certificate: dict[str, Any] | None = None
    prototypes: list[list[float]] | None = None
    detector: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.job not in JOBS:
            raise BadInput(f"the vector's job is {self.job!r}; expected one of {', '.join(JOBS)}")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise BadInput(f"the budget is {self.budget}; expected a positive number of logits")


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """A direction in hidden space, where it is added, and how strongly.

    `layer` is the index of the block after which it is added (0 is the first), or `"head"`: the
    head's input, after the final norm.
    """

    direction: Tensor  # [d] float32
    layer: int | str
    alpha: float = 1.0
    card: Card = field(default_factory=Card)

    def __post_init__(self) -> None:
        v = self.direction
        if v.ndim != 1 or not v.is_floating_point() or v.numel() == 0:
            raise BadInput(
                f"the direction is {v.dtype} of shape {list(v.shape)}; expected floats [d]"
            )
        if not v.isfinite().all():
            raise BadInput(
                f"the direction holds {int((~v.isfinite()).sum())} numbers that are NaN or "
                "infinite; expected finite ones"
            )
        object.__setattr__(self, "direction", v.detach().float().contiguous())
        check_alpha(self.alpha)
        object.__setattr__(self, "alpha", float(self.alpha))
        whole = isinstance(self.layer, int) and not isinstance(self.layer, bool)
        if not (whole and int(self.layer) >= 0) and self.layer != HEAD:
            raise BadInput(
                f"the layer is {self.layer!r}; expected a block's index from 0, or {HEAD!r}"
            )

    @property
    def size(self) -> int:
        """d, the width of the direction."""
        return self.direction.shape[0]

    @property
    def added(self) -> Tensor:
        """What is added to a hidden state, `[d]`: alpha * v."""
        return self.direction * self.alpha

    def __mul__(self, factor: float) -> "SteeringVector":
        """Scale the strength; a negative factor turns the direction round."""
        if factor < 0:
            return -self * -factor
        return replace(self, alpha=self.alpha * factor, card=self._derived())

    __rmul__ = __mul__

    def __neg__(self) -> "SteeringVector":
        """Point the other way."""
        return replace(self, direction=-self.direction, card=self._derived())

    def __add__(self, other: "SteeringVector") -> "SteeringVector":
        """Return one vector of strength 1 that adds what both add, at the same layer."""
        if self.layer != other.layer or self.size != other.size:
            raise BadInput(
                f"the vectors are of layer {self.layer} and width {self.size}, and of layer "
                f"{other.layer} and width {other.size}; expected the same layer and width: "
                "apply them side by side instead"
            )
        shared = {
            name: value
            for name, value in ((n, getattr(self.card, n)) for n in ("model", "head_sha256"))
            if value == getattr(other.card, name)
        }
        return SteeringVector(self.added + other.added, self.layer, 1.0, Card(**shared))

    def __sub__(self, other: "SteeringVector") -> "SteeringVector":
        """Add the other turned round."""
        return self + -other

    def _derived(self) -> Card:
        # What was certified, measured or fitted was so for the vector as it was.
        return replace(
            self.card, budget=None, certificate=None, prototypes=None, detector=None, metrics={}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the card with layer and alpha, as it stands in the file."""
        return {"layer": self.layer, "alpha": self.alpha, **asdict(self.card)}

    def save(self, path: str | Path) -> Path:
        """Write one `.safetensors` file: tensor `direction`, and the card in its metadata.

        The file is either whole or not there at all.
        """
        path = Path(path)
        if path.suffix != ".safetensors":
            raise BadInput(
                f"the vector's file is {path.name}; expected a name that ends in .safetensors"
            )
        card = json.dumps(self.to_dict(), allow_nan=False)
        write_whole(path, save({"direction": self.direction}, {"card": card}))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "SteeringVector":
        """Read a vector that `save` wrote."""
        path = Path(path)
        try:
            open_file(path).close()  # no pipe that would keep us waiting
            with safe_open(path, "pt") as file:
                names, meta = list(file.keys()), file.metadata() or {}
                direction = file.get_tensor("direction") if "direction" in names else None
                # memory of its own: where a tensor begins decides the last bits of a product
                direction = None if direction is None else direction.clone()
        except FileNotFoundError as error:
            raise BadInput(f"there is no vector at {path}; train one, or name its file") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise BadCheckpoint(f"{path} is not a safetensors file: {error}") from error
        if direction is None or "card" not in meta:
            raise BadCheckpoint(
                f"{path} holds the tensors {shorten(names)}; expected `direction` "
                "and a card in the metadata, as `lmhead steer train` writes them"
            )
        try:
            about = parse_object(meta["card"])
            layer, alpha = about.pop("layer"), about.pop("alpha")
            known = {f.name for f in fields(Card)}
            card = Card(**{name: value for name, value in about.items() if name in known})
            return cls(direction, layer, alpha, card)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BadCheckpoint(
                f"the card of {path} cannot be read ({error}); write the vector again"
            ) from error

    def __repr__(self) -> str:
        norm = float(self.direction.norm())
        return (
            f"SteeringVector(d={self.size}, norm={norm:.4g}, layer={self.layer!r}, "
            f"alpha={self.alpha:g}, job={self.card.job!r})"
        )


def check_alpha(alpha: float) -> None:
    """Refuse a strength that is not a number, or 0; below 0 it points the other way."""
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or alpha == 0 or not math.isfinite(alpha):
        raise BadInput(
            f"alpha is {alpha!r}; expected a number other than 0 (below 0 reverses the vector)"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file, whole or not at all."""
    with written_whole(path, force=True) as staging:
        staging.write_bytes(content)
