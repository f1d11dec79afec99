"""The radix cache as a middleware of the router: `/generate` with text goes out as tokens, `/retrieve_from_text`.

It knows SGLang's and slime's wire format; what text means is the cache's matter. Text is tokenised without special
tokens, as slime's training side does; SGLang by itself would add BOS where the tokenizer has one, and the tokens that
are trained would not be those that were sampled from.

What long texts cost is paid in threads, so that other clients' requests do not wait. C code that makes one long list or
one long JSON text does not let the event loop run meanwhile, in whichever thread it is. So long arrays are written in
pieces. docs/how-it-works/radix-cache.md says what is promised."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec

from skyrl.http.messages import AsgiApp
from skyrl.router.messages import Request, Response
from skyrl.router.middleware import CallNext, RouterContext, RouterMiddleware
from skyrl.router.radix.cache import KEPT_VERSIONS, MAX_BYTES, Prompt, RadixCache
from skyrl.router.radix.trajectory import Cut, Tokens, Unverified, is_aborted, read_sample

INLINE_BYTES = 64 * 2**10
"""Bodies up to this size are read and tokenised on the event loop: the way to a thread and back costs more."""
THREADS = 2
"""Long texts at a time. The others wait, in the order of their arrival."""
_PIECE = 2**14
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="radix")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. `size`: the bytes that it works on. It must not touch the cache."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))


def with_arrays(fields: Mapping[str, Any], arrays: Mapping[str, array[Any] | bytearray]) -> bytes:
    """JSON of an object with these fields, and these arrays of numbers. Raises UnicodeEncodeError for text that is not
    valid Unicode."""
    parts = [json.dumps(dict(fields), ensure_ascii=False, separators=(",", ":")).encode()[:-1]]
    for name, numbers in arrays.items():
        comma = b"," if fields or len(parts) > 1 else b""
        parts += [comma, json.dumps(name).encode(), b":[", b",".join(_pieces(numbers)), b"]"]
    return b"".join([*parts, b"}"])


def _pieces(numbers: array[Any] | bytearray) -> list[bytes]:
    starts = range(0, len(numbers), _PIECE)
    return [msgspec.json.encode(list(numbers[start : start + _PIECE]))[1:-1] for start in starts]


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
        self._threads = Threads()
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
        content = await request.body()
        try:
            text = await self._threads.run(len(content), _text_of, content)
        except UnicodeEncodeError:
            return Response.of_json(400, {"error": "text is not valid Unicode"})
        except (ValueError, RecursionError):
            return Response.of_json(400, {"error": "the body is not valid JSON"})
        if text is None:
            return Response.of_json(400, {"error": "text is required (a string that is not empty)"})
        whole = self.cache.whole(text)
        if whole is not None:
            body = await self._threads.run(len(content), lambda: _retrieved(text, whole.tokens()))
        else:
            cut = self.cache.find(text)
            prompt, body = await self._threads.run(len(content), self._retrieved_prompt, text, cut)
            self.cache.count(prompt.reused, len(prompt.tokens), hit=prompt.cut is not None)
        return Response(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body)

    def _retrieved_prompt(self, text: str, cut: Cut | None) -> tuple[Prompt, bytes]:
        prompt = self.cache.complete(text, cut)
        return prompt, _retrieved(text, prompt.tokens)

    async def _generate(self, request: Request, call_next: CallNext) -> Response:
        try:
            prompt = await self._prepare(request)
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
            content = await response.body()
            answer = await self._threads.run(len(content), _parsed, content)
            if not is_aborted(answer) or tries >= self._retries or await request.client_leaves(self._pause_s):
                break
            tries += 1
            self.retried += 1
        for one in answer if isinstance(answer, list) else [answer]:
            await self._store(prompt, one, len(content))
        return response

    async def _prepare(self, request: Request) -> Prompt | None:
        """Put tokens in the place of the text. None, and an unchanged request, if it is not one text alone. Raises
        ValueError, RecursionError."""
        content = await request.body()
        body = await self._threads.run(len(content), _of_one_text, content)
        if body is None:
            return None
        text = body.pop("text")
        cut = self.cache.find(text)
        prompt, changed = await self._threads.run(len(content), self._with_tokens, body, text, cut)
        self.cache.count(prompt.reused, len(prompt.tokens), hit=prompt.cut is not None)
        request.set_body(changed)
        return prompt

    def _with_tokens(self, body: dict[str, Any], text: str, cut: Cut | None) -> tuple[Prompt, bytes]:
        prompt = self.cache.complete(text, cut)
        fields = {name: value for name, value in body.items() if name != "input_ids"} | {"return_logprob": True}
        return prompt, with_arrays(fields, {"input_ids": prompt.tokens.ids})

    async def _store(self, prompt: Prompt, answer: Any, size: int) -> None:
        if is_aborted(answer):
            self.aborted += 1
            return
        try:
            sample, version = await self._threads.run(size, read_sample, answer, self._tokenizer)
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
                answer = await self._threads.run(len(last), _parsed, last)
                await self._store(prompt, answer, len(last))
                last = b""
            yield chunk
        if not done:
            self.unverified += 1

    def _encode(self, text: str) -> list[int]:
        if len(text) <= INLINE_BYTES:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # `encode` holds the GIL
        return encoding.ids


def _text_of(content: bytes) -> str | None:
    """The text of a body of `/retrieve_from_text`; None if it has none. Raises ValueError, RecursionError."""
    body = json.loads(content)
    text = body.get("text") if isinstance(body, dict) else None
    if not isinstance(text, str) or not text:
        return None
    text.encode()  # fails here for text that is not valid Unicode
    return text


def _retrieved(text: str, tokens: Tokens) -> bytes:
    fields = {"response": text, "token_length": len(tokens), "loss_mask_length": len(tokens)}
    arrays = {"tokens": tokens.ids, "loss_mask": tokens.mask, "rollout_logp": tokens.logprobs}
    return with_arrays(fields, arrays)


def _of_one_text(content: bytes) -> dict[str, Any] | None:
    """The body of `/generate`, if its prompt is one text alone. Raises ValueError, RecursionError."""
    body = json.loads(content)
    if not isinstance(body, dict) or not isinstance(body.get("text"), str) or not body["text"]:
        return None
    if any(body.get(name) is not None for name in OTHER_INPUT):
        return None
    body["text"].encode()  # fails here for text that is not valid Unicode; `with_arrays` for other fields
    return body


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
