"""The first sentence of an answer for several workers of which some failed: their own reason, where they agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SHOWN_CHARACTERS = 2_000
"""The most characters of a reason. `results` of the answer has the whole."""
_NUMBER = re.compile(r"\d+")


class Failure(NamedTuple):
    """What one worker answered. `body`: its JSON, its text, or None. `error`: why there is no answer."""

    worker: str
    status: int | None
    body: Any
    error: str | None

    def reason(self) -> str:
        """In the worker's words: SGLang's `message`, vLLM's `error.message`, FastAPI's `detail`, or a text."""
        if self.status is None:
            return self.error or "no answer"
        body = self.body if isinstance(self.body, dict) else {"message": self.body}
        error = body.get("error")
        more = error.get("message") if isinstance(error, dict) else error
        texts = (one for one in (body.get("message"), more, body.get("detail")) if isinstance(one, str) and one)
        return next(texts, f"status {self.status} without a reason")[:SHOWN_CHARACTERS]


def first_sentence(failed: Sequence[Failure], workers: int) -> str:
    """`failed` has at least one of the `workers` that were asked. Reasons agree if they differ in numbers alone: each
    worker has another count of requests in flight."""
    reasons = [one.reason() for one in failed]
    if len({_NUMBER.sub("0", reason) for reason in reasons}) > 1:
        return f"workers failed for different reasons, the first, {failed[0].worker}: {reasons[0]}"
    return reasons[0] if len(failed) == workers else f"{reasons[0]} (so say {len(failed)} of {workers} workers)"
