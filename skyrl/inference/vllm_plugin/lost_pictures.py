"""Lets vLLM compute requests whose pictures its engine has lost.

vLLM's API server processes a picture, and remembers that the engine has the result: later requests with this picture
send its name alone. But the engine may not have it. The first request was refused after its pictures were processed, or
its client left, or the engine dropped the picture earlier than the API server forgot it. Then vLLM 0.32 answers 500 and
forgets that the engine has the picture, so that the next request sends it again. Here the API server repeats the
request at once.

Knows the route for token ids and pictures, and the API server's memory of pictures.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import GenerationError
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

MAX_REPETITIONS = 3
"""In between, other requests may be refused whose pictures are the same."""

_forgotten = 0
"""How often this process has learned that the engine does not have a picture."""


def repeat_requests() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    serve_tokens, invalidate = ServingTokens.serve_tokens, LruKeyReplicatedSenderCache.invalidate
    if serve_tokens.__module__ == __name__:
        return

    def noted(cache: Any, mm_hash: str) -> None:
        global _forgotten
        _forgotten += 1
        invalidate(cache, mm_hash)

    async def serve(serving: Any, request: Any, raw_request: Any = None) -> Any:
        for _ in range(MAX_REPETITIONS):
            before = _forgotten
            try:
                return await serve_tokens(serving, request, raw_request)
            except GenerationError:
                if not request.content_parts or _forgotten == before:
                    raise
        return await serve_tokens(serving, request, raw_request)

    LruKeyReplicatedSenderCache.invalidate = noted  # type: ignore[method-assign]
    ServingTokens.serve_tokens = serve  # type: ignore[method-assign]
