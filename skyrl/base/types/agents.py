"""Agent sessions: one agent's conversation with the server, kept as a tree of turns with the exact tokens; why sessions
end, and why their turns fork."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.weights import WeightsRef

EndReason = Literal["called", "turns", "tokens", "bytes", "time", "idle"]
"""Why a session has ended: by a call, at one of its limits, or because nothing was asked for a time."""

ForkReason = Literal[
    "system_changed",
    "user_changed",
    "tool_result_changed",
    "tool_call_changed",
    "thinking_changed",
    "answer_changed",
    "messages_dropped",
    "messages_inserted",
    "tools_changed",
    "branch",
    "asked_again",
    "template_rewrites",
    "not_extendable",
]
"""Why a turn does not continue the newest turn before it. All but the last four name the first message that differs.
`branch`: an earlier turn was continued a second time. `asked_again`: the same request, after its answer had been
delivered. `template_rewrites`: the model's template writes an earlier part of the conversation otherwise now, as when
it drops thoughts. `not_extendable`: it gives no tokens that can follow the earlier turn's."""


FollowedWeights = Literal["pinned", "newest"]
"""Which weights a session samples from: those that its model had when it was created, or at each turn those that the
model has then."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """When a session ends. `tokens` counts each token of the tree once: those sampled, and those that a turn adds to
    the prompt of the turn it continues. `seconds` is from its creation, `idle_s` from its last request."""

    turns: int
    tokens: int
    seconds: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A session. Times are in seconds since the epoch.

    `model` is the name that its creator gave: a served name, a checkpoint's path or a run's (`tinker://<run>`), of
    which the newest sampler weights count. `base_model` and `weights` are what that was at the creation. `sampling` are
    fields of a chat completion that hold where a request has none. With `keep_thinking` earlier answers are
    continued with their thinking, though the client or the model's template drops it. With `routed_experts` the rows of
    the experts are kept. `reward` is None until it is given.
    """

    id: str
    tenant: str
    name: str
    model: str
    base_model: str
    weights: WeightsRef
    follows: FollowedWeights
    limits: AgentLimits
    created_at: float
    used_at: float
    sampling: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    keep_thinking: bool = False
    routed_experts: bool = False
    ended_at: float | None = None
    end_reason: EndReason | None = None
    reward: float | None = None

    @property
    def thinking(self) -> Literal["template", "keep"]:
        """What becomes of the thoughts of earlier answers, as clients name it."""
        return "keep" if self.keep_thinking else "template"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights that sampled the tokens of a turn from `first` on, up to the next span. `version` is the inference
    servers' name for them."""

    first: int
    version: str


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """An answer of the model, with what is new in the request before it.

    The request's messages are those of the turn `parent` (None: there is none), that turn's `answer`, and `messages`.
    The prompt's tokens are those of the parent's prompt, the parent's `sampled`, and `added`; all are token ids, int32.
    `logprobs` (float32, of the length of `sampled`) are those under which the tokens were sampled, and under a grammar
    the model's own. A turn whose request
    shares messages with an earlier turn but not its tokens has no parent; then `messages` are all its messages, and
    `added` is the whole prompt.

    `key` is the same for two requests with the same messages, tools and options; `attempt` counts those that were
    answered apart. `setting` are the tools and the fields that the template reads, of a turn without parent. `answer`
    is the assistant's message. `fork` is why the turn does not continue the newest one; `forked_at` is the number of
    the first message that differs. `template_note` says how the model's template writes the conversation otherwise than
    the tokens have it: why a turn forked, or what was kept all the same; None if it does not. `usage` are numbers of
    tokens: `prompt`, `cached`, `sampled`.
    """

    id: str
    session_id: str
    parent: str | None
    key: bytes
    attempt: int
    messages: list[dict[str, Any]]
    setting: dict[str, Any]
    added: NDArray[np.int32]
    sampled: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    answer: dict[str, Any]
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, int]
    dialect: str
    created_at: float
    ended_at: float
    fork: ForkReason | None = None
    forked_at: int | None = None
    template_note: str | None = None
    routed_experts: bytes | None = None
    """As vLLM sends them: NumPy's file format, uint8 or int16 [tokens, layers, experts per token]."""
    constrained: NDArray[np.bool_] | None = None
    """Which of the sampled tokens a grammar has narrowed the choice of; None: none."""
    own_logprobs: bool = True
    """Whether `logprobs` of constrained tokens are the model's own. False: the inference server gave those under the
    grammar, and the turn is not trained."""
