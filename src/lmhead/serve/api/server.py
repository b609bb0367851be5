"""What the answers share: the model, the worker, the vectors, the limits and the counters."""

import time
import uuid
from dataclasses import dataclass, field

from lmhead.loading import Model
from lmhead.serve.api.errors import Refused
from lmhead.serve.api.metrics import Metrics
from lmhead.serve.api.pieces import Pieces
from lmhead.serve.api.settings import Settings
from lmhead.serve.api.vectors import Vectors
from lmhead.serve.worker import Worker


@dataclass
class Server:
    """One model, served."""

    name: str  # what clients call the model
    model: Model
    worker: Worker
    settings: Settings
    vectors: Vectors
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.model)
        self.metrics = Metrics(self.worker)

    @property
    def context(self) -> int | None:
        """How many tokens the model reads."""
        return self.model.body.context

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the served one."""
        if name not in (None, "", self.name):
            raise Refused(
                404,
                f"there is no model {_shown(name)} here; this server serves only {self.name!r}",
                param="model",
                code="model_not_found",
            )


def _shown(name: str | None) -> str:
    return ascii(name) if len(name or "") <= 80 else "of that long name"


def new_id(kind: str) -> str:
    """Return an id for a reply."""
    return f"{kind}-{uuid.uuid4().hex}"
