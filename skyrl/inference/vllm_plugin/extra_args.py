"""The `vllm_xargs` that a completions request may send to skyrl's plugin, and the place of the plugin's answer.

vLLM gives one list of prompt logprobs, with a row per prompt token. Each row is a map from token to logprob, and a map
keeps neither the order nor the number of equal draws. So the plugin appends one row for each requested cell and draw,
with one token each. API and plugin both use this module; it imports neither vLLM nor torch.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_CELLS = "skyrl_prompt_cells"
_DRAWS = "skyrl_prompt_draws"
_SEED = "skyrl_prompt_seed"


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Logprobs requested in addition to vLLM's own, for a prompt with L tokens.

    `rows` and `ids` (int32, one entry per cell): the token `ids[c]` in the place of prompt token `rows[c] + 1`, so
    rows are in [0, L - 1). `draws`: how many tokens to draw in the place of every prompt token except the first, at the
    request's temperature. `seed` (64 bit) makes the draws repeatable. The request's own seed cannot: vLLM adds i to it
    for sample i, and returns the prompt logprobs of the sample that ends last.
    """

    rows: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    draws: int = 0
    seed: int | None = None

    def appended(self, prompt_tokens: int) -> int:
        """The number of appended rows: first the cells, then the draws of each position."""
        return len(self.rows) + self.draws * (prompt_tokens - 1)

    def to_extra_args(self) -> dict[str, str | int]:
        """Cells are base64 text, because vLLM reads every element of a list four times."""
        xargs: dict[str, str | int] = {}
        if len(self.rows):
            cells = np.stack([self.rows, self.ids]).astype("<i4")
            xargs[_CELLS] = base64.b64encode(cells.tobytes()).decode()
        if self.draws:
            xargs[_DRAWS] = self.draws
        if self.seed is not None:
            xargs[_SEED] = self.seed
        return xargs

    @classmethod
    def from_extra_args(
        cls, xargs: Mapping[str, Any] | None, prompt_tokens: int, vocab_size: int
    ) -> PromptScores | None:
        """None without cells and draws. Raises ValueError for xargs that are invalid for this prompt."""
        if not xargs or not (_CELLS in xargs or _DRAWS in xargs):
            return None
        draws, seed = xargs.get(_DRAWS, 0), xargs.get(_SEED)
        if not isinstance(draws, int) or draws < 0:
            raise ValueError(f"{_DRAWS} must be a number of draws, got {draws!r}")
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ValueError(f"{_SEED} must be a seed, got {seed!r}")
        try:
            raw = base64.b64decode(xargs.get(_CELLS, ""), validate=True)
            rows, ids = np.frombuffer(raw, "<i4").reshape(2, -1)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"{_CELLS} must be rows and ids, int32 in base64") from error
        if ((rows < 0) | (rows >= prompt_tokens - 1) | (ids < 0) | (ids >= vocab_size)).any():
            raise ValueError(f"{_CELLS} names a row or an id out of range")
        return cls(rows, ids, draws, seed)
