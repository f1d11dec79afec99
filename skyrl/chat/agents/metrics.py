"""Agent sessions of an API process: their turns, tokens and forks, and how they end. No label names a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from skyrl.base.types.agents import EndReason, ForkReason
from skyrl.runtime.metrics.tallies import OK, SERVER_ERROR, USER_ERROR

if TYPE_CHECKING:  # brings NumPy, which the launcher does without
    from skyrl.base.types.agents import AgentTurn

Dialect = Literal["chat", "messages", "responses"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
TURN_OUTCOMES = (OK, USER_ERROR, SERVER_ERROR)
FORKS: tuple[ForkReason, ...] = get_args(ForkReason)
ENDS: tuple[EndReason, ...] = get_args(EndReason)
TOKENS = ("prompt", "prompt_cached", "added", "sampled")
OWN_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class AgentMetrics:
    """Each series exists from the start. An unknown dialect or reason is a KeyError: clients can add no series."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._open = Gauge("skyrl_agent_sessions", "Agent sessions in memory.", registry=registry)
        turns = Counter("skyrl_agent_turns", "Turns that ended.", ["dialect", "outcome"], registry=registry)
        self._turns = {(dialect, end): turns.labels(dialect, end) for dialect in DIALECTS for end in TURN_OUTCOMES}
        about = "Requests that got the stored answer of an earlier turn."
        self._repeats = _each(Counter("skyrl_agent_repeats", about, ["dialect"], registry=registry), DIALECTS)
        about = "Turns that do not continue the newest turn before them."
        self._forks = _each(Counter("skyrl_agent_forks", about, ["reason"], registry=registry), FORKS)
        about = "Tokens of turns that succeeded; `added` is the part of `prompt` that no earlier turn had."
        self._tokens = _each(Counter("skyrl_agent_tokens", about, ["kind"], registry=registry), TOKENS)
        about = "Agent sessions that this process has ended."
        self._ends = _each(Counter("skyrl_agent_sessions_ended", about, ["reason"], registry=registry), ENDS)
        about = "Time until a turn's place in the session and its prompt's tokens are known."
        self._own = Histogram("skyrl_agent_own_seconds", about, buckets=OWN_BOUNDS, registry=registry)

    def watch(self, sessions: Callable[[], int]) -> None:
        """Show this number of sessions. It is asked at each scrape, on another thread."""
        self._open.set_function(sessions)

    def answered(self, turns: Sequence[AgentTurn], own_s: float) -> None:
        """Count the new turns of one request, one for each choice. `own_s` is the time that was spent to find the
        request's place and to make its tokens."""
        first = turns[0]
        self._turns[first.dialect, OK].inc(len(turns))
        self._tokens["prompt"].inc(first.usage["prompt"])
        self._tokens["prompt_cached"].inc(first.usage["cached"])
        self._tokens["added"].inc(len(first.added))
        self._tokens["sampled"].inc(sum(len(turn.sampled) for turn in turns))
        for turn in turns:
            if turn.fork is not None:
                self._forks[turn.fork].inc()
        self._own.observe(own_s)

    def failed(self, dialect: str, status: int) -> None:
        """Count a turn that was answered with this HTTP status of an error. A request that was refused for now (429) is
        no turn; `skyrl_samples_refused_total` counts it."""
        if status != 429:
            self._turns[dialect, SERVER_ERROR if status >= 500 else USER_ERROR].inc()

    def repeated(self, dialect: str) -> None:
        self._repeats[dialect].inc()

    def ended(self, reason: EndReason, number: int = 1) -> None:
        """Count the ends of sessions."""
        self._ends[reason].inc(number)


def _each(counter: Counter, values: Sequence[str]) -> dict[str, Counter]:
    """The series of a counter's only label."""
    return {value: counter.labels(value) for value in values}
