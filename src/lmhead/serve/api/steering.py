"""`/v1/steering`: the vectors that requests may name; list, upload, delete."""

from fastapi import APIRouter, Request

from lmhead.serve.api.errors import Json, Refused
from lmhead.serve.api.schemas import Deleted, VectorList, VectorReply
from lmhead.serve.api.server import Server
from lmhead.serve.api.vectors import check_name

router = APIRouter()
_BINARY = {
    "requestBody": {
        "required": True,
        "description": "A .safetensors file of lmhead, or a GGUF control vector.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("/v1/steering", response_model=None, responses={200: {"model": VectorList}})
async def vectors(http: Request) -> Json:
    """Describe every vector, with its certificate."""
    server: Server = http.app.state.server
    return Json({"object": "list", "data": server.vectors.list()})


@router.get("/v1/steering/{name}", response_model=None, responses={200: {"model": VectorReply}})
async def vector(name: str, http: Request) -> Json:
    """Tell of one vector."""
    server: Server = http.app.state.server
    return Json(server.vectors.get(name).to_dict())


@router.put(
    "/v1/steering/{name}",
    response_model=None,
    status_code=201,
    responses={201: {"model": VectorReply}},
    openapi_extra=_BINARY,
)
async def upload(name: str, http: Request) -> Json:
    """Take a vector under a name that is free; it is certified for this model first."""
    server: Server = http.app.state.server
    check_name(name)
    content = await http.body()
    if not content:
        raise Refused(400, "the body is empty; expected the bytes of a vector's file")
    known = await server.worker.call(lambda: server.vectors.upload(name, content))
    return Json(known.to_dict(), status_code=201)


@router.delete("/v1/steering/{name}", response_model=None, responses={200: {"model": Deleted}})
async def delete(name: str, http: Request) -> Json:
    """Forget a vector; requests that run with it go on."""
    server: Server = http.app.state.server
    await server.worker.call(lambda: server.vectors.delete(name))
    return Json({"name": name, "deleted": True})
