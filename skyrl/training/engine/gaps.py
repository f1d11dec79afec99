"""Numbers that do not arrive: how long commands wait for them, and why they fail afterwards.

A client never sends a number again after a refusal or after its own death, so a command behind a missing number would
wait until its session ends. Knows views of the scheduler and times; settles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.training.engine.queues import ModelView


@dataclass(frozen=True, slots=True)
class _Gap:
    """`missing` is the number that has not arrived. `last_row` is the row of the model's newest command."""

    missing: int
    last_row: int


class Gaps:
    """Times are monotonic, in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._since: dict[str, tuple[_Gap, float]] = {}

    def overdue(self, views: Mapping[str, ModelView], now: float) -> dict[str, int]:
        """The models whose commands have waited for `timeout_s` for a number, each with that number.

        The time begins when the model's earlier commands have ended, and again with each command of the model that
        arrives: the SDK sends the first chunk of a pass after all others, which may take long on a slow network.
        """
        found: dict[str, tuple[_Gap, float]] = {}
        for model_id, view in views.items():
            if not view.missing or view.held:  # number 0 makes the model, and is recorded with it
                continue
            gap = _Gap(view.missing, max(command.n for command in view.commands))
            before, since = self._since.get(model_id, (gap, now))
            found[model_id] = gap, since if before == gap else now
        self._since = found
        return {model: gap.missing for model, (gap, since) in found.items() if now - since >= self.timeout_s}

    def never_came(self, missing: int) -> FailedRequest:
        """Why a command fails that waited for the number `missing`."""
        return FailedRequest(
            f"seq_id: command {missing} of this model has not arrived within {self.timeout_s:g} s, so this later "
            "command was not run: commands run in the order of their numbers. The client or the network has lost it; "
            "send the commands from there on again, under new numbers",
            ErrorCategory.UNKNOWN,
        )


def came_late(command: Command) -> FailedRequest:
    """Why a command fails whose number was waited for in vain."""
    return FailedRequest(
        f"seq_id: command {command.seq_id} of this model arrived after later commands had ended, so it was not run: "
        "commands run in the order of their numbers. Send it again under a new number",
        ErrorCategory.UNKNOWN,
    )
