"""Records which public methods of the SDK the catalogue calls. A call that the SDK makes to itself does not count."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .presence import clients, public_methods

OURS = __name__.rpartition(".")[0] + "."


class Calls:
    """Watches every public method of the installed SDK's clients."""

    def __init__(self) -> None:
        self.feature = ""
        self.by_feature: dict[str, list[str]] = {}

    def watch(self) -> None:
        for owner, client in clients().items():
            for name in public_methods(client):
                attribute = inspect.getattr_static(client, name)
                is_static = isinstance(attribute, staticmethod)
                watched = self._watched(f"{owner}.{name}", attribute.__func__ if is_static else attribute)
                setattr(client, name, staticmethod(watched) if is_static else watched)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(sys._getframe(1).f_globals["__name__"]).startswith(OURS):
                seen = self.by_feature.setdefault(self.feature, [])
                if name not in seen:
                    seen.append(name)
            return function(*args, **kwargs)

        return call
