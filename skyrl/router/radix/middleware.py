"""The radix cache as a middleware of the router: `/generate` with text goes out as tokens, `/retrieve_from_text`.

It knows SGLang's and slime's wire format; what text means is the cache's matter. Text is tokenised without special
tokens, as slime's training side does; SGLang by itself would add BOS where the tokenizer has one, and the tokens that
are trained would not be those that were sampled from.

docs/how-it-works/radix-cache.md says what is promised.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from skyrl.router.context import RouterContext
from skyrl.router.messages import AsgiApp, Request, Response
from skyrl.router.middleware import CallNext, RouterMiddleware
from skyrl.router.radix.cache import KEPT_VERSIONS, MAX_BYTES, Prompt, RadixCache
from skyrl.router.radix.samples import Unverified, is_aborted, read_sample

ABORT_RETRIES = 5
ABORT_PAUSE_S = 0.5
OTHER_INPUT = (
    "input_ids",
    "input_embeds",
    "input_tokens",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
)


class RadixTreeMiddleware(RouterMiddleware):
    """Options: `radix_max_bytes` (bytes), `radix_kept_versions`, `radix_abort_retries`, `radix_abort_pause_s`
    (seconds). Raises ValueError for a bad option and without a tokenizer."""

    def __init__(self, app: AsgiApp, *, router: RouterContext) -> None:
        super().__init__(app, router=router)
        self._tokenizer = router.tokenizer
        self._retries = int(_option(router, "radix_abort_retries", ABORT_RETRIES, 0))
        self._pause_s = _option(router, "radix_abort_pause_s", ABORT_PAUSE_S, 0)
        self.cache = RadixCache(
            self._encode,
            int(_option(router, "radix_max_bytes", MAX_BYTES, 0)),
            int(_option(router, "radix_kept_versions", KEPT_VERSIONS, 1)),
        )
        self.unverified = self.aborted = self.retried = 0

    def stats(self) -> Mapping[str, int | float]:
        counts = {"unverified": self.unverified, "aborted": self.aborted, "retried": self.retried}
        return {**self.cache.stats(), **counts}

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        if request.path == "/retrieve_from_text" and request.method == "POST":
            return await self._retrieve(request)
        if request.path == "/generate" and request.method in ("POST", "PUT"):
            return await self._generate(request, call_next)
        return await call_next(request)

    async def _retrieve(self, request: Request) -> Response:
        try:
            body = await request.json()
            text = body.get("text") if isinstance(body, dict) else None
            if not isinstance(text, str) or not text:
                return Response.of_json(400, {"error": "text is required (a string that is not empty)"})
            text.encode()
            tokens = self.cache.retrieve(text)
        except UnicodeEncodeError:
            return Response.of_json(400, {"error": "text is not valid Unicode"})
        except (ValueError, RecursionError):
            return Response.of_json(400, {"error": "the body is not valid JSON"})
        return Response.of_json(
            200,
            {
                "tokens": tokens.ids,
                "response": text,
                "loss_mask": tokens.mask,
                "token_length": len(tokens.ids),
                "loss_mask_length": len(tokens.mask),
                "rollout_logp": tokens.logprobs,
            },
        )

    async def _generate(self, request: Request, call_next: CallNext) -> Response:
        try:
            body = await request.json()
            prompt = self._prepare(request, body)
        except (ValueError, RecursionError):
            return await call_next(request)  # the worker says what is wrong with it
        if prompt is None:
            return await call_next(request)
        tries = 0
        while True:
            response = await call_next(request)
            if response.status != 200:
                return response
            if (response.headers.get("content-type") or "").startswith("text/event-stream"):
                response.set_chunks(self._collected(response.chunks(), prompt))
                return response
            answer = _parsed(await response.body())
            if not is_aborted(answer) or tries >= self._retries or await request.client_leaves(self._pause_s):
                break
            tries += 1
            self.retried += 1
        for one in answer if isinstance(answer, list) else [answer]:
            self._store(prompt, one)
        return response

    def _prepare(self, request: Request, body: Any) -> Prompt | None:
        """Put tokens in the place of the text. None, and an unchanged request, if it is not one text alone."""
        if not isinstance(body, dict) or not isinstance(body.get("text"), str) or not body["text"]:
            return None
        if any(body.get(name) is not None for name in OTHER_INPUT):
            return None
        body = dict(body)
        json.dumps(body, ensure_ascii=False).encode()  # fails here for text that is not valid Unicode
        prompt = self.cache.prompt(body.pop("text"))
        request.set_json({**body, "input_ids": prompt.tokens.ids, "return_logprob": True})
        return prompt

    def _store(self, prompt: Prompt, answer: Any) -> None:
        if is_aborted(answer):
            self.aborted += 1
            return
        try:
            sample, version = read_sample(answer, self._tokenizer)
        except (Unverified, OverflowError):
            self.unverified += 1
            return
        self.cache.store(prompt, sample, version)

    async def _collected(self, chunks: AsyncIterator[bytes], prompt: Prompt) -> AsyncIterator[bytes]:
        """Pass a stream of cumulative events on; at its end store the last event."""
        rest, last, done = b"", b"", False
        async for chunk in chunks:
            if len(rest) <= self.router.max_body_bytes:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    done = done or data == b"[DONE]"
                    last = data if data and not done else last
            if done and last:
                self._store(prompt, _parsed(last))
                last = b""
            yield chunk
        if not done:
            self.unverified += 1

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _option(router: RouterContext, name: str, default: float, least: float) -> float:
    value = router.options.get(name, default)
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not least <= number < float("inf"):
        raise ValueError(f"--middleware-options: {name} must be a number of at least {least:g}, not {value!r}")
    return number
