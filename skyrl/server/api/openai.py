"""The OpenAI-compatible routes for models and completions, and vLLM's for token ids, under Tinker's path and under the
usual one."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from skyrl.chat.dialects.dialect import ChatEncoder
from skyrl.chat.openai.fields import CompletionFields, GenerateFields
from skyrl.chat.openai.generation import GENERATE, completion, generate
from skyrl.server.api.call import Call
from skyrl.server.api.generating import Generating
from skyrl.server.api.reply import reply
from skyrl.server.api.route import Body
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services

PREFIXES = ("/oai/api/v1", "/v1")
MESSAGES = "/v1/messages"


def is_openai(path: str) -> bool:
    """Whether a path is under the prefixes of these routes: then errors have OpenAI's shape."""
    return path.startswith(("/oai/", "/v1/", "/inference/"))


def is_anthropic(path: str) -> bool:
    """Whether errors of a path have Anthropic's shape."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def router(services: Services) -> Routes:
    routes = Routes("openai", prefix="")
    models, generating = services.openai_models, Generating(services)

    async def list_models(call: Call) -> Response:
        """An agent's key shows the base models alone. Each base model tells what its agent sessions do."""
        agent = call.caller.agent_session is not None
        listed = models.served() if agent else await models.listed(call.tenant)
        return reply({"object": "list", "data": [await with_habits(each) for each in listed]})

    async def with_habits(model: dict[str, Any]) -> dict[str, Any]:
        number = services.served.number_of(model["id"]) if "parent" not in model else None
        if number is None or services.served[number].openai is None:
            return model
        habits = await services.agent_continuations.habits(number)
        return model | {"agent_sessions": habits.description}

    async def get_model(call: Call, model: str) -> Response:
        if call.caller.agent_session is not None:
            return reply(models.any_name(model))
        return reply(await with_habits((await models.find(model, call.tenant)).description))

    async def completions(call: Call, body: bytes) -> Response:
        return await generating.answer(call, body, completion, ChatEncoder())

    async def generate_tokens(call: Call, body: bytes) -> Response:
        """vLLM's own route for token ids."""
        return await generating.answer(call, body, generate, ChatEncoder())

    for prefix in PREFIXES:
        routes.get(f"{prefix}/models", scope="agent")(list_models)
        routes.get(f"{prefix}/models/{{model:path}}", scope="agent")(get_model)
        body = Body(CompletionFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/completions", scope="sample", body=body)(completions)
        body = Body(GenerateFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix.removesuffix('/v1')}{GENERATE}", scope="sample", body=body)(generate_tokens)
    return routes
