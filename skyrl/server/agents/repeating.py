"""A stored answer as a chat completion again, whole or as chunks: for a client that asks a second time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from skyrl.base.types.agents import AgentTurn
from skyrl.server.agents.running import RunningTurn

COMPLETION_ID = "chatcmpl-"


def repeated(turns: Sequence[AgentTurn], n: int) -> RunningTurn:
    """The last `n` answers to a request, as a turn that has ended."""
    turn = RunningTurn(turns[-n:][0].id, None, tokens=0, n=n, streams=False)
    turn.end(turns[-n:], None)
    return turn


def whole(turns: Sequence[AgentTurn], model: str) -> bytes:
    """A chat completion without logprobs: the texts of the tokens are not stored."""
    choices = [
        {
            "index": index,
            "message": turn.answer,
            "logprobs": None,
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_reason,
        }
        for index, turn in enumerate(turns)
    ]
    head = _head(turns, model) | {"object": "chat.completion"}
    return msgspec.json.encode(head | {"choices": choices, "usage": _usage(turns)})


def chunks(turns: Sequence[AgentTurn], model: str) -> list[bytes]:
    """The same as a stream."""
    head = _head(turns, model) | {"object": "chat.completion.chunk"}
    parts: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        delta = dict(turn.answer)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(calls)]
        parts.append({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        end = {"index": index, "delta": {}, "finish_reason": turn.finish_reason, "stop_reason": turn.stop_reason}
        parts.append({"choices": [end]})
    parts.append({"choices": [], "usage": _usage(turns)})
    return [msgspec.json.encode(head | part) for part in parts]


def _head(turns: Sequence[AgentTurn], model: str) -> dict[str, Any]:
    return {"id": f"{COMPLETION_ID}{turns[0].id}", "created": int(turns[0].created_at), "model": model}


def _usage(turns: Sequence[AgentTurn]) -> dict[str, Any]:
    prompt, cached = turns[0].usage["prompt"], turns[0].usage["cached"]
    sampled = sum(len(turn.sampled) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
