"""What is counted of agents' turns and sessions, and that no agent can add a series."""

from __future__ import annotations

from typing import get_args

import pytest
from one_turn import turn
from prometheus_client import CollectorRegistry

from skyrl.base.types.agents import EndReason, ForkReason
from skyrl.chat.agents.live_sessions import AgentMetrics


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """The numbers that are not zero, by name and values of labels."""
    samples = [each for family in registry.collect() for each in family.samples]
    return {
        " ".join([each.name.removeprefix("skyrl_agent_"), *each.labels.values()]): each.value
        for each in samples
        if each.value and not each.name.endswith(("_created", "_bucket"))
    }


def test_a_turns_tokens_are_counted_once_for_all_its_choices_and_forks_by_reason() -> None:
    registry = CollectorRegistry()
    AgentMetrics(registry).answered([turn(4), turn(5, "asked_again")], 0.002)
    assert counted(registry) == {
        "turns_total messages ok": 2,
        "tokens_total prompt": 10,
        "tokens_total prompt_cached": 7,
        "tokens_total added": 3,
        "tokens_total sampled": 9,
        "forks_total asked_again": 1,
        "own_seconds_count": 1,
        "own_seconds_sum": 0.002,
    }


def test_failures_are_counted_by_whose_fault_they_are_and_refusals_not_at_all() -> None:
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    for status in (400, 403, 429, 500, 503):
        metrics.failed("chat", status)
    assert counted(registry) == {"turns_total chat user_error": 2, "turns_total chat server_error": 2}


def test_repeats_ends_and_the_sessions_in_memory_are_shown() -> None:
    registry = CollectorRegistry()
    metrics, sessions = AgentMetrics(registry), ["s1", "s2"]
    metrics.watch(lambda: len(sessions))
    metrics.repeated("responses")
    metrics.ended("idle")
    shown = {"sessions": 2, "repeats_total responses": 1, "sessions_ended_total idle": 1}
    assert counted(registry) == shown
    sessions.clear()
    assert "sessions" not in counted(registry)


def test_every_reason_for_a_fork_and_for_an_end_has_a_series() -> None:
    registry = CollectorRegistry()
    AgentMetrics(registry)
    reasons = {
        family.name: {sample.labels["reason"] for sample in family.samples if sample.name.endswith("_total")}
        for family in registry.collect()
        if family.name in ("skyrl_agent_forks", "skyrl_agent_sessions_ended")
    }
    assert reasons == {
        "skyrl_agent_forks": {*get_args(ForkReason)},
        "skyrl_agent_sessions_ended": {*get_args(EndReason)},
    }


def test_values_from_outside_add_no_series() -> None:
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    before = len([each for family in registry.collect() for each in family.samples])
    for add in (
        lambda: metrics.failed("an agent's word", 400),
        lambda: metrics.repeated("x"),
        lambda: metrics.answered([turn(1, dialect="y")], 0.1),
    ):
        with pytest.raises(KeyError):
            add()
    assert len([each for family in registry.collect() for each in family.samples]) == before
