"""Asks a router for samples: one, a group, or the rest of one that was aborted. Bounds what is asked at once.

It works in front of vLLM's sidecars and of SGLang alike. It knows neither trajectories nor how engines are started.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import aiohttp

from skyrl.rollout.aborting import abort_until_idle
from skyrl.rollout.config import RolloutConfig
from skyrl.rollout.errors import BadAnswer, RolloutTimeout
from skyrl.rollout.messages import NOTHING, RolloutAnswer, RolloutRequest, new_session_id, read_answer
from skyrl.rollout.places import Places
from skyrl.rollout.sending import CONNECT_S, Counters, Sender
from skyrl.rollout.stops import cut_at_stop, may_have_begun, stops_of

ROUTING_KEY = "X-SMG-Routing-Key"
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
    aiohttp.ClientError for a connection that broke without `rollout_retry_interrupted`. A cancelled call closes its
    connection, so that the worker stops sampling."""

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
        key = self.config.rollout_api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the places are the bound
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self._sender = Sender(self._session, self.counters, retry_interrupted=self.config.rollout_retry_interrupted)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

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
                return await self._in_time(request, aborting, allowed, begun if request.text is None else "")
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
                await abort_until_idle(
                    self._session, self.config.router_url, self.config.rollout_abort_timeout_s, lambda: self._calls
                )
            finally:
                self._aborting = asyncio.Event()  # calls that are older keep the event that is set
                self._not_aborting.set()

    async def retrieve(self, text: str) -> RetrievedText:
        """The tokens of `text` from the radix cache of the router, or from its tokenizer where the cache has none."""
        url, failures = f"{self.config.router_url}/retrieve_from_text", list[str]()
        body = {"text": text, "return_logp": True}
        try:
            async with asyncio.timeout(self.config.rollout_deadline_s):
                got = await self._sender.post(url, body, {}, failures, asyncio.Event())
        except TimeoutError:
            raise RolloutTimeout(f"no tokens of a text; last failure: {failures[-1] if failures else 'none'}") from None
        return _read_retrieved(got)

    async def _in_time(
        self, request: RolloutRequest, aborting: asyncio.Event, may_continue: bool, begun: str
    ) -> RolloutAnswer:
        failures: list[str] = []
        try:
            async with asyncio.timeout(self.config.rollout_deadline_s):
                return await self._parts(request, failures, aborting, may_continue, begun)
        except TimeoutError:
            last = failures[-1] if failures else "none"
            raise RolloutTimeout(
                f"no sample within {self.config.rollout_deadline_s:g} s; last failure: {last}"
            ) from None

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
