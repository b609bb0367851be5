"""What clients send, and what they get: the JSON objects, as OpenAPI describes them.

Unknown fields pass, as clients of other servers send some. Numbers must be numbers: a text that
looks like one is refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from lmhead.sampling.params import RANGES

Id = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | list[Id] | list[str] | list[list[Id]]

_LISTS: dict[str, Any] = {
    "logit_bias": dict[str, float],
    "allowed_ids": list[Id],
    "banned_ids": list[Id],
    "stop_ids": list[Id],
    "dry_sequence_breakers": list[str],
    "json_schema": str | dict[str, Any],
    "regex": str,
    "grammar": str,
    "keep_ties": bool,
    "mirostat": Literal[0, 2],
    "logprobs_mode": Literal["raw", "processed"],
}
_ELSEWHERE = ("logprobs", "seed")  # these are OpenAI's own, and differ from ours


class Body(BaseModel):
    """An object that a client sends."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _controls() -> dict[str, Any]:
    """Return every control of the sampler as an optional field with its range."""
    fields: dict[str, Any] = {}
    for name, allowed in RANGES.items():
        if name in _ELSEWHERE:
            continue
        limits: dict[str, Any] = {"gt" if allowed.open_low else "ge": allowed.low}
        if allowed.high != float("inf"):
            limits["lt" if allowed.open_high else "le"] = allowed.high
        kind = int if allowed.whole else float
        fields[name] = (Annotated[kind, Field(**limits)] | None, None)
    return fields | {name: (kind | None, None) for name, kind in _LISTS.items()}


Controls: Any = create_model(
    "Controls", __base__=Body, __doc__="Every control of the sampler.", **_controls()
)
CONTROLS = tuple(Controls.model_fields)


class SteerWith(Body):
    """A vector to steer with, by its name on this server."""

    name: str = Field(min_length=1, max_length=64)
    alpha: float | None = Field(None, description="Its strength; that of its card by default.")
    budget: float | None = Field(None, gt=0, description="The largest range of delta, in logits.")
    kl_cap: float | None = Field(None, gt=0, description="The largest KL at a token, in nat.")


class StreamOptions(Body):
    """What a stream tells besides."""

    include_usage: bool | None = None


class Generating(Controls):  # type: ignore[misc]
    """What completions and chat have in common."""

    model: str | None = Field(None, description="The served model; it is the only one.")
    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    order: str | list[str] | None = Field(None, description="hf, vllm, llama.cpp, or filters.")
    steering: list[SteerWith] | None = Field(None, max_length=16)


class CompletionBody(Generating):
    """A text, or several, to continue."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, description="How many best tokens to tell of.")
    suffix: str | None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="Not supported.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens of logprobs `token_id:7`."
    )


class Part(Body):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None


class Message(Body):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None


class SchemaFormat(Body):
    """A JSON schema that the answer must follow."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ChatBody(Generating):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None


class TokenizeBody(Body):
    """A text to turn into ids."""

    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Ids to turn into a text."""

    tokens: list[Id]


class ChoicesBody(Body):
    """Continuations to choose from."""

    model: str | None = None
    prompt: str | list[Id]
    choices: list[str] | list[list[Id]] = Field(min_length=1, max_length=256)


class NextBody(Controls):  # type: ignore[misc]
    """A prompt whose next token is asked for; with controls, what each filter does."""

    model: str | None = None
    prompt: str | list[Id]
    top: int | None = Field(None, ge=1, le=1000)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    order: str | list[str] | None = None


class LensBody(Body):
    """A prompt to look through the head at, after every block."""

    model: str | None = None
    prompt: str | list[Id]
    token: str | Id | None = Field(None, description="A token to follow, by its text or id.")
    top: int | None = Field(None, ge=1, le=20, description="Best tokens of each cell; 5.")
    last: int | None = Field(None, ge=1, le=32, description="Positions, from the end; 8.")


class Usage(BaseModel):
    """How many tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SteeringReport(BaseModel):
    """What steering did to a choice, token by token; flips is a share."""

    vectors: list[dict[str, Any]]
    budget: float | None
    kl_cap: float | None
    tokens: int
    held_back: int
    flips: float
    mean_strength: float
    min_strength: float
    max_kl: float
    max_range: float
    kl: list[float] = Field(description="Of each token, in nat.")
    strength: list[float] = Field(description="Of each token; 1 is all of the steering.")
    notes: list[str]


class CompletionLogprobs(BaseModel):
    """Log-probabilities, a list of equal length each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    steering: SteeringReport | None = None


class CompletionReply(BaseModel):
    """Continuations; those of one prompt stand together."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(BaseModel):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """The same, with the best alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer, and how it ended."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    steering: SteeringReport | None = None


class ChatReply(BaseModel):
    """Answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    """All that is served: one model."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    """Ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class Text(BaseModel):
    """The text of ids."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs to know of the tokenizer."""

    model_config = ConfigDict(extra="allow")
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class ScoredChoice(BaseModel):
    """A continuation and how probable it is among the others."""

    index: int
    text: str
    ids: list[int]
    score: float = Field(description="A logit where rows alone were read, else a logprob.")
    probability: float


class ChoicesReply(BaseModel):
    """Continuations, in the order in which they came; `best` is the index of the likeliest."""

    model: str
    best: int
    rows_read: int | None = Field(description="Rows of the head that were read; null: all.")
    choices: list[ScoredChoice]
    usage: Usage


class NextReply(BaseModel):
    """The next token: the best ones, what is left for the others, and the trace."""

    model_config = ConfigDict(extra="allow")
    model: str
    tokens: list[dict[str, Any]]
    rest: float
    trace: dict[str, Any] | None


class LensReply(BaseModel):
    """What the head would say after every block; the last row is what the model says."""

    model_config = ConfigDict(extra="allow")
    model: str
    ids: list[int]
    tokens: list[str]
    rows: list[dict[str, Any]]


class VectorReply(BaseModel):
    """A steering vector that the server knows."""

    name: str
    layers: list[int | str]
    alpha: list[float]
    width: int
    job: str | None
    budget: float | None
    certificate: dict[str, Any] | None = Field(description="At the head; null elsewhere.")
    note: str | None


class VectorList(BaseModel):
    """All steering vectors."""

    object: Literal["list"]
    data: list[VectorReply]


class Deleted(BaseModel):
    """A vector that is gone."""

    name: str
    deleted: bool
