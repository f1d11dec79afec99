"""A session of an agent, and a turn of it as an inference server could have answered it, for tests that count turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl.base.types.agents import AgentLimits, AgentSession, AgentTurn, ForkReason
from skyrl.base.types.weights import BaseWeights

NOW = 1_000_000.0
LIMITS = AgentLimits(turns=3, tokens=100, seconds=1_000.0, idle_s=50.0)


def turn(sampled: int, /, fork: ForkReason | None = None, **fields: Any) -> AgentTurn:
    """A turn that adds 3 tokens to a prompt of 10, of which 7 were cached."""
    known: dict[str, Any] = {
        "id": "t1",
        "session_id": "s1",
        "parent": None,
        "key": b"k",
        "attempt": 0,
        "messages": [],
        "setting": {},
        "added": np.arange(3, dtype=np.int32),
        "sampled": np.arange(sampled, dtype=np.int32),
        "logprobs": np.zeros(sampled, np.float32),
        "versions": (),
        "answer": {},
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt": 10, "cached": 7, "sampled": sampled},
        "dialect": "messages",
        "created_at": 1.0,
        "ended_at": 2.0,
    }
    return AgentTurn(**known | fields, fork=fork)


def session(session_id: str, **fields: Any) -> AgentSession:
    known: dict[str, Any] = {
        "id": session_id,
        "tenant": "one",
        "name": f"task of {session_id}",
        "model": "tiny",
        "base_model": "acme/base",
        "weights": BaseWeights(),
        "follows": "pinned",
        "limits": LIMITS,
        "created_at": NOW,
        "used_at": NOW,
    }
    return AgentSession(**known | fields)
