"""Whose fault an agent's exception is: the server's, and a new session may go well, or the agent's own.

Agents use SDKs that this package does not import, and these use HTTP libraries of several names. So errors are known by
HTTP's status, or by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Iterator

BROKEN = frozenset({"APIConnectionError", "TransportError", "ClientConnectionError", "ConnectionError"})
"""Classes of errors of connections: of openai and anthropic, of httpx and its forks, of aiohttp, and Python's own."""


def is_servers(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is a connection that broke or an answer 5xx."""
    return any(_is_servers(each) for each in _chain(error))


def _is_servers(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)  # openai, anthropic, litellm
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)  # httpx
    if isinstance(status, int):
        return status >= 500
    return not BROKEN.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and those of an exception group."""
    seen: set[int] = set()
    found = [error]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        found += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
