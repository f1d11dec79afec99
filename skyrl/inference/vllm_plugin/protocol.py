"""What skyrl's processes and the plugin tell each other: versions, two headers, and the `vllm_xargs` of completions.

- TESTED_VERSIONS: the versions of vLLM that the plugin was tested with.
- TOKENS_ONLY: a completion request with this header wants token ids and logprobs alone (see `answers`). With the value
  PROMPT_CELLS it also wants the prompt's logprobs as arrays (see `prompt_cells`).
- INCARNATION: the incarnation of a vLLM server (which start of it answers), as a header of every answer of `/health`.
  vLLM adds `IncarnationHeader` by its option `--middleware`; it runs in the API server, in any version of vLLM.
- TENANT_TAGS: a request's priority, modulo this, is a tag of its tenant.
- `PromptScores`: the logprobs of a prompt that a request wants beside vLLM's own. vLLM gives one list of prompt
  logprobs, with a row per prompt token. Each row is a map from token to logprob, and a map keeps neither the order nor
  the number of equal draws. So the plugin appends one row for each requested cell and draw, with one token each.

Imports neither vLLM nor torch, and numpy only for scores: the launcher starts faster without it. Knows nothing of the
rest of skyrl.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TESTED_VERSIONS = ("0.32.",)

TELL_VERSIONS_VARIABLE = "SKYRL_VLLM_TELL_VERSIONS"
"""Environment variable; "1": chats, and the first event of each choice of a stream, tell the weights' version too."""


INCARNATION = "x-skyrl-incarnation"
TENANT_TAGS = 256
"""The order of requests is that of the quotients. Two tenants may have the same tag."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class IncarnationHeader:
    """ASGI middleware. The header's value is drawn when the server builds its application: each start has another."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._header = (INCARNATION.encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/health":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, send_with_header)


TOKENS_ONLY = "x-skyrl-tokens-only"
PROMPT_CELLS = "prompt_cells"
"""Also the field of the choice (of the whole answer, if it has pictures) that takes the place of `prompt_logprobs`."""


def pack_cells(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> str:
    """The value of PROMPT_CELLS, base64: of [n] cells the ids, then the logprobs. The rows of the prompt's own tokens
    come first, `1 + prompt_logprobs` cells each, the own token before the best ones; then the appended cells."""
    return base64.b64encode(ids.astype("<i4", copy=False).tobytes() + logprobs.astype("<f4").tobytes()).decode()


def unpack_cells(data: bytes) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The arrays of `pack_cells`, from its decoded base64. Raises ValueError for other data."""
    import numpy as np

    half = len(data) // 2
    return np.frombuffer(data[:half], "<i4"), np.frombuffer(data[half:], "<f4")


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
        import numpy as np

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
        import numpy as np

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
