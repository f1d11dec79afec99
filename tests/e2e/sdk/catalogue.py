"""The catalogue: what a user can do with the SDK, one function per feature.

A feature's check uses `tinker` and NumPy only, in whatever version is installed. The check does not know which versions
exist: it looks up in the SDK at run time what it needs (presence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .user import User

ANNOUNCEMENT = "/__feature__/"
"""The path under which a run announces its next feature to the recorder in front of the server."""

QUESTION = "/__asked__/"
"""The path under which a check asks the recorder how many requests a route got since the feature began."""

Check = Callable[["User"], None]


class BrokenSDK(Exception):
    """A check found a known bug of the SDK that a server cannot repair; the message names the bug."""


@dataclass(frozen=True)
class Feature:
    """One row of the compatibility table."""

    name: str
    group: str
    sentence: str
    """What a user gets and the check asserts."""
    check: Check
    needs: tuple[str, ...] = ()
    """What an SDK must have for this feature, in the notation of presence.py."""
    refusal: str | None = None
    """A part of the message that refuses the feature; None if the feature works."""
    statuses: frozenset[int] = frozenset()
    """HTTP statuses of 400 and above that the check provokes on purpose."""
    last: bool = False
    """Checked after all other features."""
    sees: bool = False
    """Checked on a server whose model takes pictures."""


CATALOGUE: dict[str, Feature] = {}
"""All features by name, in the order of the table."""


def feature(
    group: str,
    sentence: str,
    *,
    needs: tuple[str, ...] = (),
    refusal: str | None = None,
    statuses: tuple[int, ...] = (),
    last: bool = False,
    sees: bool = False,
) -> Callable[[Check], Check]:
    """Enter a check. The feature's name is the function's name with spaces."""

    def enter(check: Check) -> Check:
        name = check.__name__.replace("_", " ").strip()
        assert name not in CATALOGUE, f"two features are named {name!r}"
        CATALOGUE[name] = Feature(name, group, sentence, check, needs, refusal, frozenset(statuses), last, sees)
        return check

    return enter
