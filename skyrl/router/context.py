"""What the router tells its middleware: its options, its bounds, and the tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BODY_BYTES = 64 * 2**20


class RouterContext:
    """`tokenizer_dir` is the directory of `--tokenizer`; None if the option was not given. `options` are the values of
    `--middleware-options`, by name."""

    def __init__(
        self,
        *,
        tokenizer_dir: Path | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        options: dict[str, object] | None = None,
    ) -> None:
        self.tokenizer_dir = tokenizer_dir
        self.max_body_bytes = max_body_bytes
        self.options = options or {}
        # The names that middleware written for slime's router reads
        self.args = SimpleNamespace(hf_checkpoint=None if tokenizer_dir is None else str(tokenizer_dir))
        self.verbose = False

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
