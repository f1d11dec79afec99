"""The OpenAI-compatible routes: models, completions and chats, under Tinker's path and under the usual one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.responses import Response

from skyrl.server.api.call import Call
from skyrl.server.api.event_stream import EventStream, gone
from skyrl.server.api.reply import reply
from skyrl.server.api.route import Body
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services
from skyrl.server.futures.recording import LARGE_BODY_BYTES
from skyrl.server.openai.errors import OpenAIError
from skyrl.server.openai.fields import ChatFields, CompletionFields
from skyrl.server.openai.generation import Generation, chat, completion, model_in
from skyrl.server.openai.service import Asked

PREFIXES = ("/oai/api/v1", "/v1")


def is_openai(path: str) -> bool:
    """Whether a path is under the prefixes of these routes: then errors have OpenAI's shape."""
    return path.startswith(("/oai/", "/v1/"))


def router(services: Services) -> Routes:
    routes = Routes("openai", prefix="")
    models, in_flight = services.openai_models, services.openai_in_flight

    async def list_models(call: Call) -> Response:
        return reply({"object": "list", "data": await models.listed(call.tenant)})

    async def get_model(call: Call, model: str) -> Response:
        return reply((await models.find(model, call.tenant)).description)

    async def completions(call: Call, body: bytes) -> Response:
        return await generate(call, body, completion)

    async def chat_completions(call: Call, body: bytes) -> Response:
        """The chat is rendered with the model's own template."""
        return await generate(call, body, chat)

    async def generate(call: Call, body: bytes, check: Callable[..., Generation]) -> Response:
        if any(model.openai is None for model in services.served):
            raise OpenAIError(
                "this server samples between two turns of training (colocate_all) and serves no completions; sample "
                "with the Tinker SDK",
                status=501,
                final=True,
            )
        in_flight.check_open()
        is_large = len(body) > LARGE_BODY_BYTES
        name = await asyncio.to_thread(model_in, body) if is_large else model_in(body)
        target = await models.find(name, call.tenant)
        model = services.served[target.number]
        checked = partial(check, body, model.watch.limits(), grammars=services.config.openai_grammars)
        request = await asyncio.to_thread(checked) if is_large else checked()
        if call.large_body is not None:
            call.large_body.release()  # the request may run for minutes; from here on its bytes count in the admission
        assert model.openai is not None
        asked = Asked(request, target, call.tenant, call.id, len(body))
        if request.stream:
            deadline_s = services.config.forwarding_deadline_s
            return await EventStream.begin(model.openai.stream(asked), in_flight, call.request, call.id, deadline_s)
        answer = await in_flight.run(model.openai.answer(asked), gone(call.request.receive))
        return Response(answer, media_type="application/json")

    for prefix in PREFIXES:
        routes.get(f"{prefix}/models", scope="sample")(list_models)
        routes.get(f"{prefix}/models/{{model:path}}", scope="sample")(get_model)
        body = Body(CompletionFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/completions", scope="sample", body=body)(completions)
        body = Body(ChatFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/chat/completions", scope="sample", body=body)(chat_completions)
    return routes
