"""How a conversation of several turns keeps its exact tokens: on the client, or in the router's radix cache.

- `plain`: the client sends token ids, and appends what it gets. It needs token ids from its user, or `encode`.
- `radix`: the client sends the whole text, and asks the router's cache for the tokens, masks and logprobs.

Knows neither HTTP nor the format of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl.rollout.client import RolloutClient
from skyrl.rollout.errors import BadAnswer
from skyrl.rollout.messages import RolloutAnswer, RolloutRequest, SamplingParams, new_session_id

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text, without special tokens."""


@dataclass
class Trajectory:
    """`tokens`, `loss_mask` (1: sampled) and `logprobs` (0.0 where the mask is 0) are parallel and cover the whole
    conversation. `session_id` keeps its turns at one worker; None: a new one. `text` is empty with `plain` if the user
    gives token ids. `begun` is the text of a partial sample with which the trajectory ends, with `plain`. `lora_path`
    names the adapter. With `return_routed_experts`, `parts` has the server's answers of all turns, for
    `skyrl.rollout.routed_experts`."""

    session_id: str | None = None
    lora_path: str | None = None
    text: str = ""
    begun: str = ""
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    return_routed_experts: bool = False
    parts: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session_id = self.session_id or new_session_id()

    def keep_parts(self, answer: RolloutAnswer) -> None:
        if self.return_routed_experts:
            self.parts += answer.parts


class Strategy(Protocol):
    async def turn(self, trajectory: Trajectory, added: str | Sequence[int], params: SamplingParams) -> RolloutAnswer:
        """Append `added` to the trajectory, sample, and append the sample. `added` may be empty except in the first
        turn. A failed turn leaves the trajectory as it was. Raises what RolloutClient.generate raises, and
        ValueError for an `added` of the wrong kind."""
        ...


class PlainStrategy:
    """A partial sample of an abort is appended like a whole one; a turn that adds nothing goes on from there, and finds
    a stop string that began before it."""

    def __init__(self, client: RolloutClient, encode: Encode | None = None) -> None:
        self._client = client
        self._encode = encode

    async def turn(self, trajectory: Trajectory, added: str | Sequence[int], params: SamplingParams) -> RolloutAnswer:
        if isinstance(added, str) and self._encode is None:
            raise ValueError("text needs the strategy radix, or an `encode` for plain")
        new = self._encode(added) if isinstance(added, str) and self._encode is not None else added
        new = [int(token) for token in new]
        request = RolloutRequest(
            input_ids=[*trajectory.tokens, *new],
            params=params,
            session_id=trajectory.session_id,
            lora_path=trajectory.lora_path,
            return_routed_experts=trajectory.return_routed_experts,
        )
        begun = "" if new else trajectory.begun
        answer = await self._client.generate(request, begun=begun)
        kept = len(trajectory.text) - answer.stop_began_before
        if isinstance(added, str) or (trajectory.text and not new):
            text = added if isinstance(added, str) else ""
            trajectory.text = trajectory.text[: max(0, kept)] + text + answer.text
        trajectory.begun = begun + answer.text if answer.finish_reason == "abort" else ""
        trajectory.tokens += [*new, *answer.tokens]
        trajectory.loss_mask += [0] * len(new) + [1] * len(answer.tokens)
        trajectory.logprobs += [0.0] * len(new) + list(answer.logprobs)
        trajectory.keep_parts(answer)
        return answer


class RadixStrategy:
    """The cache stores no aborted samples: after an answer with finish_reason "abort" the trajectory is as before, and
    the turn may be repeated."""

    def __init__(self, client: RolloutClient, encode: Encode | None = None) -> None:
        del encode  # the router tokenises
        self._client = client

    async def turn(self, trajectory: Trajectory, added: str | Sequence[int], params: SamplingParams) -> RolloutAnswer:
        if not isinstance(added, str):
            raise ValueError("token ids need the strategy plain; radix takes text")
        request = RolloutRequest(
            text=trajectory.text + added,
            params=params,
            session_id=trajectory.session_id,
            lora_path=trajectory.lora_path,
            return_routed_experts=trajectory.return_routed_experts,
        )
        answer = await self._client.generate(request)
        if answer.finish_reason == "abort":
            return answer
        text = trajectory.text + added + answer.text
        got = await self._client.retrieve(text)
        start = len(got.tokens) - len(answer.tokens)
        if start < 0 or tuple(got.tokens[start:]) != answer.tokens or not all(got.loss_mask[start:]):
            raise BadAnswer(
                "the router's radix cache does not hold this sample: is the middleware `radix` on? Another sample of "
                "the same text, or a newer weight version, may have taken its place"
            )
        trajectory.text = text
        trajectory.tokens, trajectory.loss_mask = got.tokens, got.loss_mask
        trajectory.logprobs = [*got.logprobs[:start], *answer.logprobs]
        trajectory.keep_parts(answer)
        return answer


STRATEGIES: dict[str, Callable[[RolloutClient, Encode | None], Strategy]] = {
    "plain": PlainStrategy,
    "radix": RadixStrategy,
}


def make_strategy(client: RolloutClient, encode: Encode | None = None) -> Strategy:
    """The strategy that the client's configuration names. Raises ValueError for an unknown name."""
    name = client.config.rollout_strategy
    if name not in STRATEGIES:
        raise ValueError(f"rollout_strategy: must be one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](client, encode)
