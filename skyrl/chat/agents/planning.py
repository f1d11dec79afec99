"""Decides what a turn will be: its place in the session's tree, its prompt's tokens, and how much it may sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentTurn, ForkReason
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.answers import ASKED, Shown
from skyrl.chat.agents.live_sessions import LiveSession, over_budget
from skyrl.chat.agents.rendering.continuation import Fork, Step
from skyrl.chat.agents.rendering.loaded_models import ModelContinuations
from skyrl.chat.agents.rendering.renderer import Setting
from skyrl.chat.agents.tree import MESSAGE_BYTES, Place, setting_of
from skyrl.chat.openai.errors import too_long
from skyrl.chat.openai.generation import Generation, chat
from skyrl.chat.openai.messages import checked_messages
from skyrl.chat.openai.models import ModelNames, Target
from skyrl.chat.openai.service import Asked, OpenAIService

REFUSED = ("add_special_tokens", "echo", "return_prompt_text", "truncate_prompt_tokens")
"""Fields that would change the prompt's tokens, or show them in another way."""
LARGE_BYTES = 256 * 2**10
"""What takes milliseconds for a request of more bytes is done in a thread."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A chat completion that an agent asks for. `id` is that of the HTTP request, `size` the bytes of its body. With
    `retried` the client says that it asks again. `turn_id`: the id that the turn gets if it is new."""

    session_id: str
    tenant: str
    chat: dict[str, Any]
    dialect: str
    size: int
    id: str
    retried: bool
    turn_id: str

    @property
    def model(self) -> str:
        """The agent's name for the model, which the answer repeats."""
        return str(self.chat.get("model", ""))


@dataclass(frozen=True)
class SamplingModel:
    """What turns need of a base model."""

    service: OpenAIService
    limits: Callable[[], ContextLimits]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` are all ids of a turn's prompt; None if the inference server renders it. `fork`, `forked_at` and
    `template_note` are as in `AgentTurn`."""

    tokens: NDArray[np.int32] | None
    fork: ForkReason | None = None
    forked_at: int | None = None
    template_note: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn before it is sampled."""

    request: TurnRequest
    place: Place
    fields: dict[str, Any]
    prompt: Prompt
    asked: Asked
    shown: Shown

    @property
    def tokens(self) -> NDArray[np.int32] | None:
        return self.prompt.tokens

    @property
    def parent(self) -> AgentTurn | None:
        return None if self.tokens is None else self.place.parent

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Those that are new after the parent."""
        return self.fields["messages"] if self.parent is None else self.place.new

    @property
    def setting(self) -> dict[str, Any]:
        """What the template reads beside the messages; with a parent it is the parent's."""
        return setting_of(self.fields) if self.parent is None else {}

    @property
    def generation(self) -> Generation:
        return self.asked.request


class Planner:
    """`models` are the server's base models, by their numbers."""

    def __init__(
        self,
        models: Sequence[SamplingModel],
        names: ModelNames,
        continuations: ModelContinuations,
        *,
        grammars: bool,
    ) -> None:
        self.models = models
        self._names = names
        self._continuations = continuations
        self._grammars = grammars

    async def place(self, live: LiveSession, request: TurnRequest) -> tuple[Place, dict[str, Any]]:
        """Where a request belongs, and its fields with the session's defaults. Raises RequestError."""
        if wrong := [name for name in REFUSED if request.chat.get(name)]:
            raise RequestError("is not accepted in an agent session", field=wrong[0])
        fields = _with_defaults(request.chat, live.session.sampling)
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise RequestError("must be a list of at least one message", field="messages")
        live.last_request_bytes = request.size + MESSAGE_BYTES * len(messages)
        if request.size > LARGE_BYTES:
            return await asyncio.to_thread(_place, live, fields), fields
        return _place(live, fields), fields

    async def count(self, live: LiveSession, request: TurnRequest) -> int:
        """How many tokens the prompt of a request has. Raises RequestError."""
        place, fields = await self.place(live, request)
        target = await self._target(live, request)
        if (tokens := (await self._prompt(live, place, fields, target, request.turn_id)).tokens) is not None:
            return len(tokens)
        asked = Asked(
            await self._checked(fields, target, request.size), target, request.tenant, request.id, request.size
        )
        return await self.models[target.number].service.count(asked)

    async def plan(self, live: LiveSession, request: TurnRequest, place: Place, fields: dict[str, Any]) -> Plan:
        """Raises RequestError."""
        target = await self._target(live, request)
        prompt = await self._prompt(live, place, fields, target, request.turn_id)
        tokens = prompt.tokens
        shown = Shown(
            logprobs=bool(fields.get("logprobs")),
            token_ids=bool(fields.get("return_token_ids")),
            reasoning=fields.get("include_reasoning") is not False,
        )
        body = fields | ASKED | {"return_token_ids": tokens is None or shown.token_ids}
        if live.session.routed_experts:
            body["stream"] = False  # vLLM sends the experts' rows with whole answers alone
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        else:
            body.pop("stream_options", None)
        if tokens is not None:  # the earlier messages were checked when they were new
            body["messages"] = place.new or [{"role": "user", "content": "-"}]
        generation = await self._checked(body, target, request.size)
        if generation.pictures:
            raise RequestError("an agent session takes text alone", field="messages")
        asked = Asked(generation, target, request.tenant, request.id, request.size, live.session.id)
        asked = await self._fitted(asked, live, place, tokens)
        return Plan(request, place, fields, prompt, asked, shown)

    async def _target(self, live: LiveSession, request: TurnRequest) -> Target:
        session = live.session
        if session.follows == "newest":
            return await self._names.newest(session.model, session.tenant)
        return await self._names.of_weights(session.base_model, session.weights, request.model)

    async def _prompt(
        self, live: LiveSession, place: Place, fields: dict[str, Any], target: Target, turn_id: str
    ) -> Prompt:
        own = Prompt(None, place.fork, place.forked_at)
        if place.parent is None:
            return own
        before = live.tree.tokens_of(place.parent)
        if not place.new:
            return replace(own, tokens=before)
        for name, continues in (("continue_final_message", True), ("add_generation_prompt", False)):
            if fields.get(name) is continues:
                return Prompt(None, "not_extendable", place.forked_at, f"the request has {name}")
        setting = Setting.of(
            fields, live.tree.path(place.parent)[0].created_at, self.models[target.number].service.efforts
        )
        step = _step(live, place.parent, place.new, setting, turn_id)
        done = await self._continuations.continued(target.number, step, live.kept)
        if isinstance(done, Fork):
            return Prompt(None, done.reason, done.message, done.note)
        tokens = np.concatenate([before, np.array(done.ids, np.int32)])
        return Prompt(tokens, place.fork, place.forked_at, done.note)

    async def _checked(self, fields: dict[str, Any], target: Target, size: int) -> Generation:
        limits = self.models[target.number].limits()

        def checked() -> Generation:
            return chat(msgspec.json.encode(fields), limits, grammars=self._grammars)

        return await asyncio.to_thread(checked) if size > LARGE_BYTES else checked()

    async def _fitted(self, asked: Asked, live: LiveSession, place: Place, tokens: NDArray[np.int32] | None) -> Asked:
        """The request with the prompt's tokens, whose answer fits the context and the session. Raises OpenAIError."""
        model, n = self.models[asked.target.number], asked.request.size.n
        context, before = model.limits().max_context, 0
        if tokens is None:
            asked = await model.service.fitting(asked)
            size = asked.request.size
            within = size.max_tokens is not None and size.most_tokens <= live.tokens_left
            added = size.likely_prompt if within else await model.service.count(asked)
        else:
            assert place.parent is not None
            before = live.tree.length(place.parent)
            added = len(tokens) - before
            if context is not None and len(tokens) >= context:
                raise too_long(len(tokens), model.limits())
        left = live.tokens_left // n - added
        if live.turns_left < n or left <= 0:
            raise over_budget(live, n, added)
        wanted, request = asked.request.size.max_tokens, asked.request
        if tokens is None:
            return asked if wanted is not None and wanted <= left else replace(asked, request=request.at_most(left))
        bounds = (left, wanted, None if context is None else context - len(tokens))
        most = min(bound for bound in bounds if bound is not None)
        known = before - 1 if live.session.routed_experts else 0  # the last token sampled so far has no record yet
        return replace(asked, request=request.with_prompt(tokens.tolist(), most, experts_from=known))


def _step(live: LiveSession, parent: AgentTurn, new: list[dict[str, Any]], setting: Setting, turn_id: str) -> Step:
    before: list[dict[str, Any]] = []
    said: list[bool] = []
    joined: int | None = None
    path = live.tree.path(parent)
    for turn in path:
        before += turn.messages
        said += [False for message in turn.messages if message["role"] == "assistant"]
        if turn.parent is not None and not turn.messages:
            joined = len(before)
        if turn is not parent:
            before.append(turn.answer)
            said.append(True)
    return Step(
        id=parent.id,
        next_id=turn_id,
        before=before,
        said=said,
        answer=parent.answer,
        new=new,
        prompt=parent.added,
        sampled=parent.sampled,
        setting=setting,
        keep=live.session.keep_thinking,
        joined=joined,
    )


def _with_defaults(chat: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A request with the session's fields where it has none of its own; arguments of the template likewise."""
    chat = {name: value for name, value in chat.items() if value is not None}
    fields = defaults | chat
    if "max_tokens" in chat and "max_completion_tokens" not in chat:  # which would win
        fields.pop("max_completion_tokens", None)
    own, given = defaults.get("chat_template_kwargs"), chat.get("chat_template_kwargs")
    if isinstance(own, dict) and isinstance(given, dict):
        fields["chat_template_kwargs"] = own | given
    return fields


def _place(live: LiveSession, fields: dict[str, Any]) -> Place:
    """Raises RequestError naming the message behind an earlier turn that is not well formed: the tail is made of
    those."""
    messages = fields["messages"]
    place = live.tree.place(setting_of(fields), messages, live.session.keep_thinking)
    if place.parent is not None and place.new:
        checked_messages(place.new, len(messages) - len(place.new))
    return place
