"""Which of a server's engines looks after a row: by the name of the base model in the row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of base models whose rows an engine looks after: those in `within`; if it is None, all names but those
    in `without`, also names that the server does not serve any more.

    Each training base model of a server has its scope, and each name is in exactly one."""

    within: frozenset[str] | None = None
    without: frozenset[str] = frozenset()

    def __contains__(self, base_model: str) -> bool:
        return base_model in self.within if self.within is not None else base_model not in self.without

    @property
    def has_rest(self) -> bool:
        """Whether names that the server does not serve are in the scope. One engine of a server has them."""
        return self.within is None

    @property
    def is_everything(self) -> bool:
        """Whether this is the scope of a server's only engine."""
        return self.within is None and not self.without


EVERYTHING = Scope()
