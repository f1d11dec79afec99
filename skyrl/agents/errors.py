"""What can go wrong with agent sessions, as exceptions."""

from __future__ import annotations


class AgentsError(Exception):
    """Base of all errors of this package."""


class RequestRefused(AgentsError):
    """The server answered with an error that asking again does not change. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class ServerUnavailable(AgentsError):
    """The server gave no answer, however often it was asked. The text has the last failure."""


class BadAnswer(AgentsError):
    """An answer of the server lacks something or contradicts itself."""


class CommandFailed(AgentsError):
    """An agent's command ended with another status than 0, or was stopped at its time limit. `output` is the end of
    what it wrote."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(f"{message}: {output[-2000:]}" if output else message)
        self.output = output
