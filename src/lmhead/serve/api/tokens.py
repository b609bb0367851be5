"""`/v1/models`, `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from typing import Any

from fastapi import APIRouter, Request

from lmhead.serve.api.errors import Json, Refused
from lmhead.serve.api.requests import encode
from lmhead.serve.api.schemas import (
    DetokenizeBody,
    ModelCard,
    ModelList,
    Text,
    TokenizeBody,
    TokenizerInfo,
    Tokens,
)
from lmhead.serve.api.server import Server

router = APIRouter()


def _card(server: Server) -> dict[str, Any]:
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "lmhead",
        "max_model_len": server.context,
    }


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def models(http: Request) -> Json:
    """Tell which model is served."""
    return Json({"object": "list", "data": [_card(http.app.state.server)]})


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelCard}})
async def model(name: str, http: Request) -> Json:
    """Tell of the model by its name."""
    server: Server = http.app.state.server
    server.check_model(name)
    return Json(_card(server))


@router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}})
async def tokenize(body: TokenizeBody, http: Request) -> Json:
    """Turn a text into ids, by default with special tokens."""
    server: Server = http.app.state.server
    special = body.add_special_tokens is not False
    ids = await encode(server, body.prompt, special=special)
    return Json({"tokens": ids, "count": len(ids), "max_model_len": server.context})


@router.post("/detokenize", response_model=None, responses={200: {"model": Text}})
async def detokenize(body: DetokenizeBody, http: Request) -> Json:
    """Turn ids into a text, special tokens included."""
    server: Server = http.app.state.server
    V = server.model.reachable
    if wrong := [i for i in body.tokens if i >= V]:
        raise Refused(
            400, f"tokens holds the id {wrong[0]:,}; expected ids below {V:,}", param="tokens"
        )
    text = server.model.tokenizer.decode(
        body.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return Json({"prompt": str(text)})


@router.get("/tokenizer_info", response_model=None, responses={200: {"model": TokenizerInfo}})
async def tokenizer_info(http: Request) -> Json:
    """Tell what a client that has no tokenizer of its own must know."""
    server: Server = http.app.state.server
    tokenizer: Any = server.model.tokenizer
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return Json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": server.model.reachable,
            "model_max_length": server.context,
            **{name: getattr(tokenizer, name, None) for name in names},
            **{f"{name}_id": getattr(tokenizer, f"{name}_id", None) for name in names},
            "chat_template": tokenizer.chat_template,
        }
    )
