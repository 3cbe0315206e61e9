"""POST /tokenize and /detokenize, in vLLM's shapes."""

from fastapi import APIRouter
from starlette.requests import Request

from vexpert.server.prompts import Prompt
from vexpert.server.protocol.message import check_template_variables
from vexpert.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vexpert.server.service import Service, service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """The tokens that a prompt or a conversation would be."""
    service = service_of(request)
    await _check_model(service, request, body.model)
    prompt = await _prompt(service, request, body)
    tokens = prompt.token_ids
    texts = await service.prompts.pieces(tokens) if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.facts.max_model_len,
        tokens=list(tokens),
        token_strs=texts,
    )


async def _prompt(service: Service, request: Request, body: TokenizeRequest) -> Prompt:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return (await service.prompts.plain([body.prompt], special))[0]
    check_template_variables(body.chat_template_kwargs)
    adapter = None if body.model is None else service.adapter_of(body.model)
    own = await service.own_template(request, adapter)
    tools = [tool.for_template() for tool in body.tools or []]
    return await service.prompts.chat(body, own, tools)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens."""
    service = service_of(request)
    await _check_model(service, request, body.model)
    return DetokenizeResponse(prompt=await service.prompts.text(body.tokens))


async def _check_model(service: Service, request: Request, model: str | None) -> None:
    """Raise ApiError for a model that nobody serves, or that the API key is not for."""
    if model is None:
        return
    service.check_allowed(request, model)
    adapter = service.adapter_of(model)
    if adapter is not None and await service.engine.adapter_folder(adapter) is None:
        raise await service.unknown_model(request, model)
