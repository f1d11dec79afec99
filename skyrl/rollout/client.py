"""Asks a router for samples: one, a group, or the rest of one that was aborted. Bounds what is asked at once.

Also aborts every request at the workers of the router, and waits until the workers are idle. A request that waits for
its place can be turned away. Works in front of vLLM's sidecars and of SGLang alike. Knows neither trajectories nor how
engines are started.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from skyrl.http import connection
from skyrl.http.client import HttpClient
from skyrl.rollout.config import RolloutConfig
from skyrl.rollout.errors import BadAnswer, RequestRefused, RolloutTimeout
from skyrl.rollout.messages import (
    NOTHING,
    RolloutAnswer,
    RolloutRequest,
    cut_at_stop,
    may_have_begun,
    new_session_id,
    read_answer,
    stops_of,
)
from skyrl.rollout.sending import CONNECT_S, MOST_BYTES, Counters, Sender, error_of, parsed

ROUTING_KEY = "X-SMG-Routing-Key"
ABORT_POLL_S = 0.2
ABORT_ANSWER_S = 10.0
_NO_ANSWER = (connection.NotAccepted, connection.Interrupted)
SEED_STEP = 0x9E3779B1
SEEDS = 2**63


@dataclass(frozen=True)
class RetrievedText:
    """The tokens of a text as the radix cache holds them. The lists are parallel: `loss_mask` is 1 for sampled tokens,
    `logprobs` is 0.0 for the others."""

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]


class RolloutClient:
    """Use as an asynchronous context manager. All methods may run at once in one event loop.

    Errors of all methods that ask: RequestRefused (the server's status and message), BadAnswer (an answer that is no
    sample), RolloutTimeout (`rollout_deadline_s` has gone by; time spent waiting for a place does not count), and
    Interrupted, a ConnectionError, for a connection that broke without `rollout_retry_interrupted`. A cancelled call
    closes its connection, so that the worker stops sampling."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._places = Places(config.max_requests)
        self._calls = 0
        self._aborting = asyncio.Event()
        self._not_aborting = asyncio.Event()
        self._not_aborting.set()
        self._abort_lock = asyncio.Lock()

    async def __aenter__(self) -> RolloutClient:
        """Raises ValueError if the configuration's address of the router is none."""
        try:
            connection.address_of(self.config.router_url)
        except connection.NotAccepted as error:
            raise ValueError(f"rollout_router_ip: {error}") from error
        key = self.config.rollout_api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = HttpClient(memory_bytes=math.inf, connect_s=CONNECT_S)  # the places are the bound
        self._sender = Sender(
            self._client, self._headers, self.counters, retry_interrupted=self.config.rollout_retry_interrupted
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def generate(
        self, request: RolloutRequest, *, continue_partial: bool | None = None, begun: str = ""
    ) -> RolloutAnswer:
        """One sample. If a worker aborts it, and the prompt is `input_ids`, the rest is asked for, until
        `max_new_tokens` are there or the model stops, also at a stop string that begins in one part and ends in the
        next. With `continue_partial` False (None: the configuration decides), and after `abort_all` of this
        client, the partial sample is the answer, with finish_reason "abort"; so it is for a prompt of text, whose
        partial tokens could not be sent back exactly. `begun` is the text of a partial sample with whose tokens
        `input_ids` ends: a stop string that begins there is found, too."""
        while not self._not_aborting.is_set():
            await self._not_aborting.wait()
        aborting = self._aborting
        self._calls += 1
        try:
            if not await self._places.take():
                return NOTHING
            self.counters.running += 1
            try:
                allowed = self.config.rollout_continue_partial if continue_partial is None else continue_partial
                allowed = allowed and request.text is None
                begun = begun if request.text is None else ""
                async with self._in_time(f"no sample within {self.config.rollout_deadline_s:g} s") as failures:
                    return await self._parts(request, failures, aborting, allowed, begun)
            finally:
                self.counters.running -= 1
                self._places.give_back()
        finally:
            self._calls -= 1

    async def generate_group(
        self, request: RolloutRequest, n: int, *, continue_partial: bool | None = None
    ) -> list[RolloutAnswer]:
        """`n` samples of one prompt, in order. With `rollout_deterministic_inference`, sample i has the seed
        `rollout_seed` + i; otherwise the request's seed must be None, or all samples would be the same. The first
        error cancels the other samples and is raised."""
        if n < 1:
            raise ValueError(f"n: must be at least 1, got {n}")
        if not self.config.rollout_deterministic_inference and request.params.sampling_seed is not None and n > 1:
            raise ValueError("sampling_seed: one seed for a whole group gives equal samples")
        members = [request] * n
        if self.config.rollout_deterministic_inference:
            seeds = range(self.config.rollout_seed, self.config.rollout_seed + n)
            members = [replace(request, params=replace(request.params, sampling_seed=seed)) for seed in seeds]
        tasks = [asyncio.create_task(self.generate(one, continue_partial=continue_partial)) for one in members]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort_all(self) -> None:
        """Abort every request at every worker of the router, also those of other clients, and wait until all are idle.
        Calls of `generate` that wait get their partial answers; new ones begin when this has ended. Raises
        RolloutTimeout after `rollout_abort_timeout_s`."""
        async with self._abort_lock:
            self._not_aborting.clear()
            self._aborting.set()
            self._places.turn_away()
            try:
                await self._abort_until_idle()
            finally:
                self._aborting = asyncio.Event()  # calls that are older keep the event that is set
                self._not_aborting.set()

    async def _abort_until_idle(self) -> None:
        """Left out: workers that the router lists as unhealthy and that cannot be reached. A router that cannot be
        reached is asked again. Raises RolloutTimeout, with what each worker has left, RequestRefused (the router's) and
        BadAnswer."""
        left: dict[str, str] = {}
        try:
            async with asyncio.timeout(self.config.rollout_abort_timeout_s):
                while True:
                    try:
                        workers = await self._workers()
                    except _NO_ANSWER as error:
                        left = {self.config.router_url: f"{type(error).__name__} {error}".strip()}
                        await asyncio.sleep(ABORT_POLL_S)
                        continue
                    states = await asyncio.gather(*(self._abort(*worker) for worker in workers))
                    left = {url: state for (url, _), state in zip(workers, states, strict=True) if state is not None}
                    if not left and not self._calls:
                        return
                    await asyncio.sleep(ABORT_POLL_S)  # requests may reach a worker after its abort, so abort again
        except TimeoutError:
            waiting = ", ".join(f"{url}: {state}" for url, state in left.items()) or "no worker"
            raise RolloutTimeout(
                f"not idle {self.config.rollout_abort_timeout_s:g} s after the abort: {waiting}; requests of this "
                f"client: {self._calls}"
            ) from None

    async def _workers(self) -> list[tuple[str, bool]]:
        """The URL of each worker, and whether the router holds it for healthy."""
        try:
            listed = (await self._ask("GET", f"{self.config.router_url}/workers")).get("workers")
            return [(str(one["url"]).rstrip("/"), bool(one.get("is_healthy", True))) for one in listed]
        except (TypeError, KeyError, AttributeError) as error:
            raise BadAnswer("GET /workers: the answer lists no workers") from error

    async def _abort(self, url: str, healthy: bool) -> str | None:
        """What the worker has left, in words; None if nothing."""
        try:
            await self._ask("POST", f"{url}/abort_request", {"abort_all": True})
            count = requests_in(await self._ask("GET", f"{url}/v1/loads?include=core"))
        except (*_NO_ANSWER, RequestRefused) as error:
            return f"{type(error).__name__} {error}".strip() if healthy else None
        return f"{count} requests" if count else None

    async def _ask(self, method: str, url: str, body: Any = None) -> Any:
        """The JSON of the answer to a GET. Raises RequestRefused, BadAnswer, NotAccepted and Interrupted of the HTTP
        client."""
        if method == "GET":
            answer = await self._client.get(url, self._headers, ABORT_ANSWER_S, MOST_BYTES)
        else:
            headers = {"content-type": "application/json", **self._headers}
            answer = await self._client.post(url, msgspec.json.encode(body), headers, ABORT_ANSWER_S)
        if answer.status != 200:
            raise RequestRefused(answer.status, error_of(answer.body)[0])
        return parsed(answer.body) if method == "GET" else None

    async def retrieve(self, text: str) -> RetrievedText:
        """The tokens of `text` from the radix cache of the router, or from its tokenizer where the cache has none."""
        url = f"{self.config.router_url}/retrieve_from_text"
        body = {"text": text, "return_logp": True}
        async with self._in_time("no tokens of a text") as failures:
            return _read_retrieved(await self._sender.post(url, body, {}, failures, asyncio.Event()))

    @asynccontextmanager
    async def _in_time(self, failed: str) -> AsyncIterator[list[str]]:
        """The failures of a body that has until the deadline; the last one is in the error."""
        failures: list[str] = []
        try:
            async with asyncio.timeout(self.config.rollout_deadline_s):
                yield failures
        except TimeoutError:
            raise RolloutTimeout(f"{failed}; last failure: {failures[-1] if failures else 'none'}") from None

    async def _parts(
        self, request: RolloutRequest, failures: list[str], aborting: asyncio.Event, may_continue: bool, begun: str
    ) -> RolloutAnswer:
        answer, asked = NOTHING, request
        stops, limit = stops_of(request.params), request.params.max_new_tokens
        one_token = limit > 0 and may_have_begun(begun, stops)
        if one_token:
            asked = request.continued(answer, request.params.sampling_seed, one_token=True)
        url = f"{self.config.router_url}/generate"
        headers = {ROUTING_KEY: request.session_id or new_session_id()}
        while True:
            body = await self._sender.post(url, asked.to_json(), headers, failures, aborting)
            if body is None:  # aborted here, before it was sent again
                return replace(answer, finish_reason="abort")
            part = read_answer(asked, body)
            before, answer = answer, answer.joined(part) if answer.parts else part
            if one_token and len(answer.tokens) > request.params.min_new_tokens:
                trimmed = "" if request.params.no_stop_trim else part.matched_text
                text = cut_at_stop(begun + answer.text + trimmed, len(begun + before.text), request.params)
                if text is not None:
                    over = max(0, len(begun) - len(text))
                    return replace(answer, text=text[len(begun) :], finish_reason="stop", stop_began_before=over)
            goes_on = one_token and part.finish_reason == "length" and len(answer.tokens) < limit
            if part.finish_reason != "abort" and not goes_on:
                return answer
            self.counters.aborted += part.finish_reason == "abort"
            if aborting.is_set() or not (may_continue or goes_on):
                return replace(answer, finish_reason="abort")
            if limit and len(answer.tokens) == limit:
                return replace(answer, finish_reason="length")  # all tokens that were asked for are there
            self.counters.continued += part.finish_reason == "abort"
            one_token = may_have_begun(begun + answer.text, stops)
            seed = self._seed(request.params.sampling_seed, len(answer.tokens))
            asked = request.continued(answer, seed, one_token=one_token)

    def _seed(self, seed: int | None, done: int) -> int | None:
        """SGLang derives each token's randomness from the seed and its position. vLLM begins anew with each request,
        so the same seed would give the rest the random numbers of the beginning."""
        if seed is None or self.config.rollout_backend == "sglang":
            return seed
        return (seed + done * SEED_STEP) % SEEDS


def _read_retrieved(body: object) -> RetrievedText:
    if not isinstance(body, dict):
        raise BadAnswer("/retrieve_from_text: the answer is not an object")
    lists = [body.get(name) for name in ("tokens", "loss_mask", "rollout_logp")]
    tokens, mask, logprobs = lists
    if not (isinstance(tokens, list) and isinstance(mask, list) and isinstance(logprobs, list)):
        raise BadAnswer("/retrieve_from_text: tokens, loss_mask or rollout_logp is missing")
    if not len(tokens) == len(mask) == len(logprobs):
        raise BadAnswer("/retrieve_from_text: tokens, loss_mask and rollout_logp differ in length")
    if any(type(token) is not int for token in tokens) or any(one not in (0, 1) for one in mask):
        raise BadAnswer("/retrieve_from_text: tokens or loss_mask has a wrong value")
    if any(type(value) not in (int, float) for value in logprobs):
        raise BadAnswer("/retrieve_from_text: rollout_logp has a value that is no number")
    return RetrievedText(tokens, mask, [float(value) for value in logprobs])


def requests_in(body: Any) -> int:
    """The requests that a worker's load counts, in each of the forms in which servers write it. Raises BadAnswer."""
    loads = body.get("loads", body) if isinstance(body, dict) else body
    if isinstance(loads, list):
        return sum(requests_in(one) for one in loads)
    if isinstance(loads, dict):
        for name in ("num_total_reqs", "total_reqs", "num_reqs"):
            if type(loads.get(name)) is int:
                return loads[name]
        for prefix in ("num", "total"):
            parts = [loads.get(f"{prefix}_{kind}_reqs") for kind in ("running", "waiting")]
            if all(type(part) is int for part in parts):
                return sum(part for part in parts if part is not None)
    raise BadAnswer(f"/v1/loads: no number of requests in {str(body)[:200]}")


class Places:
    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def take(self) -> bool:
        """Wait for a place, first come first served. False: turned away, and there is nothing to give back."""
        if self._free:
            self._free -= 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():  # the place came just before the cancellation
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    def turn_away(self) -> None:
        """Turn away all that wait now."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(False)
        self._waiting.clear()
