"""The groups that one worker has with trainers, and those that can no longer be used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol

import torch

from skyrl.inference.vllm_plugin.weights.errors import WeightsError

MOST_GROUPS = 8
"""Of trainers that ended without a word, a group is left each time."""


class Group(Protocol):
    """A torch.distributed group of a trainer (rank 0) and all workers."""

    def broadcast_each(self, tensors: Iterable[torch.Tensor]) -> Generator[torch.Tensor]:
        """Fill each tensor with rank 0's next one, and give it when its values are there; tensors are taken ahead.
        Raises RuntimeError when the group fails or its time is over. When this ends, no tensor is filled any more."""
        ...

    def close(self) -> None: ...


Join = Callable[..., Group]


class Groups:
    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self.failed: dict[str, str] = {}
        """Groups that can no longer be used, and why."""
        self.receiving: Group | None = None
        """The group that a running job receives from."""

    def names(self) -> list[str]:
        return sorted(self._groups)

    def check_new(self, name: str) -> None:
        """Raises WeightsError for a name that is taken."""
        if name in self._groups:
            raise WeightsError(f"group_name: there is a group {name!r} already; destroy it first")

    def add(self, name: str, group: Group) -> None:
        """Too many groups end the oldest one."""
        if len(self._groups) >= MOST_GROUPS:
            self.fail(next(iter(self._groups)), "its trainer did not leave it, and there are too many groups")
        self._groups[name] = group
        self.failed.pop(name, None)

    def usable(self, name: str) -> Group:
        """Raises WeightsError for a group that is not there, or has failed."""
        if name in self.failed:
            raise WeightsError(f"the group {name!r} has failed ({self.failed[name]}); form it again")
        if name not in self._groups:
            raise WeightsError(f"group_name: there is no group {name!r}; call /init_weights_update_group first")
        return self._groups[name]

    def has(self, name: str, group: Group) -> bool:
        """Whether the group of this name is still this one."""
        return self._groups.get(name) is group

    def leave(self, name: str) -> None:
        """Raises WeightsError for a group that is not there."""
        known = self.failed.pop(name, None)
        group = self._groups.pop(name, None)
        if group is None and known is None:
            raise WeightsError(f"group_name: there is no group {name!r}")
        if group is not None:
            group.close()

    def fail(self, name: str, why: str) -> None:
        """A group can no longer be used. A job that receives from it closes it at its end."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        self.failed[name] = why
        if len(self.failed) > MOST_GROUPS:
            del self.failed[next(iter(self.failed))]
        if self.receiving is not group:
            group.close()
