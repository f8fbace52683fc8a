"""The routes that generate, and what each is made of."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import chat, completions
from api.deps import CurrentApi
from api.dialect import Dialect
from api.exchange import Route, exchange

CHAT = Route(chat.ChatBody, chat.ChatQuestion, chat.ChatDialect)
COMPLETIONS = Route(
    completions.CompletionBody, completions.CompletionQuestion, completions.CompletionDialect
)

DIALECTS: dict[str, type[Dialect]] = {
    chat.ROUTE: chat.ChatDialect,
    completions.ROUTE: completions.CompletionDialect,
}
"""The dialect in which a request of this route is answered, also when it is taken up again."""

router = APIRouter()


@router.post(chat.ROUTE)
async def chat_completions(request: Request, api: CurrentApi) -> Response:
    """A conversation's next message, whole or as a stream."""
    return await exchange(request, api, CHAT)


@router.post(completions.ROUTE)
async def text_completions(request: Request, api: CurrentApi) -> Response:
    """A prompt's continuation, whole or as a stream."""
    return await exchange(request, api, COMPLETIONS)
