"""What the router tells its middleware: its options, its bounds, its workers, and the tokenizer. Also under the names
that middleware written for slime's router reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

from skyrl.router.worker import Worker

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BODY_BYTES = 64 * 2**20
_OF_SLIME = frozenset({"_use_url", "_finish_url", "client", "app", "proxy", "workers", "max_weight_version"})
"""What slime's router has besides, for its own use."""


class SlimeArgs(SimpleNamespace):
    """The arguments of slime that the router knows, and the values of `--middleware-options`, as attributes."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"router.args has no {name}: give it to the router, as --middleware-options '{{\"{name}\": ...}}'"
            )


class RouterContext:
    """`tokenizer_dir` is the directory of `--tokenizer`; None if the option was not given. `options` are the values of
    `--middleware-options`, by name. `workers` gives all workers that are registered. `args`: the router's own options
    under slime's names."""

    def __init__(
        self,
        *,
        tokenizer_dir: Path | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        options: dict[str, object] | None = None,
        workers: Callable[[], Sequence[Worker]] = tuple,
        args: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer_dir = tokenizer_dir
        self.max_body_bytes = max_body_bytes
        self.options = options or {}
        self._workers = workers
        checkpoint = None if tokenizer_dir is None else str(tokenizer_dir)
        self.args = SlimeArgs(**{"hf_checkpoint": checkpoint, **(args or {}), **self.options})
        self.verbose = False

    @property
    def worker_request_counts(self) -> dict[str, int]:
        """How many requests each worker has in flight, by URL, at this moment."""
        return {worker.url: worker.in_flight for worker in self._workers()}

    @property
    def worker_failure_counts(self) -> dict[str, int]:
        """How many health probes of each worker have failed in a row."""
        return {worker.url: worker.failed_probes for worker in self._workers()}

    @property
    def dead_workers(self) -> set[str]:
        """The URLs of the workers that get no requests now."""
        return {worker.url for worker in self._workers() if not worker.routable}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model (a `tokenizers.Tokenizer`). Raises ValueError when there is none."""
        if self.tokenizer_dir is None:
            raise ValueError("--tokenizer: this middleware needs the directory of the model's tokenizer")
        from tokenizers import Tokenizer

        file = self.tokenizer_dir / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"--tokenizer: {file} does not exist")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare exceptions
            raise ValueError(f"--tokenizer: {file} cannot be read: {error}") from error

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            why = ": the router chooses a worker and asks it, in call_next" if name in _OF_SLIME else ""
            raise AttributeError(f"router has no {name}{why}; docs/howto/middleware.md lists what it has")
