"""What the page sends: one class for each question, checked as it comes in."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Ids = Annotated[list[int], Field(min_length=1, max_length=1 << 20)]


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Asked(_Question):
    """A sequence."""

    ids: Ids


class Read(_Question):
    """A prompt, the ids appended to it, and where to cut it: (position, id to go on with)."""

    prompt: str
    more: list[int] = []
    chat: bool = False
    cut: tuple[int, int] | None = None


class Lens(Asked):
    """A sequence, and a token to follow."""

    token: int | None = None


class Why(Asked):
    """A sequence, a token, and another one."""

    token: int | None = None
    against: int | None = None
    heads: bool = False


class Steering(_Question):
    """A vector, its strength, and the guard's cap."""

    vector: dict[str, Any]
    alpha: float
    kl_cap: float | None = None


class Steer(Steering):
    """The same for a sequence."""

    ids: Ids


class Generate(Asked):
    """How a sequence is continued."""

    params: dict[str, Any] = {}
    order: str | list[str] = "hf"
    max_tokens: int = 64
    steer: Steering | None = None


class Coverage(_Question):
    """The text that coverage is measured on."""

    text: Annotated[str, Field(max_length=4 << 20)] | None = None


class Export(_Question):
    """What the page shows: its address, and the replies it had."""

    state: str
    replies: list[dict[str, Any]]
