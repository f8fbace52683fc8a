"""`GET /v1/models`: the one model that is served here, and the name under which it always is."""

from fastapi import APIRouter
from fastapi.responses import Response

from api.deps import Api, CurrentApi
from api.errors import json_response, loading, model_not_found
from scheduler.pace import RETRY_AFTER_MIN_S
from scheduler.service import ServedModel

router = APIRouter()


def model_object(api: Api, name: str) -> dict[str, object]:
    """A model in OpenAI's shape. `max_model_len` is the most tokens that one request can have."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "fermata",
        "max_model_len": api.service.max_context_tokens,
    }


async def known_model(api: CurrentApi) -> ServedModel:
    """The served model. Raises ApiError when it is not described in time."""
    served = await api.service.served_model(api.server.prepare_limit_ms / 1000)
    if served is None:
        raise loading(RETRY_AFTER_MIN_S)
    return served


def check_model_name(api: CurrentApi, name: str, served: ServedModel) -> None:
    """Raises ApiError for a model that is not served. Claude Code asks for claude-* by itself."""
    if api.settings.models.accept_any or name.startswith("claude-"):
        return
    if name not in ("default", served.name):
        raise model_not_found(name, served.name)


@router.get("/v1/models")
async def list_models(api: CurrentApi) -> Response:
    """The served name first, then `default`."""
    served = await known_model(api)
    names = dict.fromkeys((served.name, "default"))
    return json_response({"object": "list", "data": [model_object(api, n) for n in names]})


@router.get("/v1/models/{name:path}")
async def show_model(api: CurrentApi, name: str) -> Response:
    """One model, by any name under which requests may ask for it."""
    served = await known_model(api)
    check_model_name(api, name, served)
    return json_response(model_object(api, served.name))
