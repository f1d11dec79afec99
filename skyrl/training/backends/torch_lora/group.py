"""The ranks as the engine sees them: a call goes to all of them, and comes back with the answers of all.

`skyrl.training.engine.rank_actors` has the implementation on Ray. Knows nothing of what the ranks compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from skyrl.training.backends.torch_lora.collectives import Agreed


class RankGroup(Protocol):
    """Ranks that run the same calls in the same order: each a `RankBase` in a process of its own.

    `call`, `call_each`, `read` and `read_all` return what `RankBase.answer` has returned. They raise RankDied, naming
    the rank and its node, when a rank has died, has raised an exception, or has not answered for the group's timeout;
    from then on always.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks, with the same arguments; the answers by rank. Several threads may call: their
        calls run one after the other."""
        ...

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """As `call`, with other arguments for each rank."""
        ...

    def read(self, method: str, *arguments: Any) -> Any:
        """Call a method on rank 0 that changes nothing. It may run beside a `call`."""
        ...

    def read_all(self, method: str, *arguments: Any) -> list[Any]:
        """As `read`, on every rank; the answers by rank."""
        ...

    def close(self) -> None:
        """End the ranks. They keep nothing."""
        ...


def results_of(answers: Sequence[Any]) -> list[Any]:
    """The results by rank. If the ranks have agreed on a failure, raises the error of the first rank that has one."""
    for answer in answers:
        if isinstance(answer, Agreed) and answer.error is not None:
            raise answer.error
    return list(answers)
