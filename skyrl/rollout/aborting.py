"""Aborts every request at the workers of a router, and waits until the workers are idle.

Knows the routes `/workers`, `/abort_request` and `/v1/loads`, and nothing of the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from skyrl.rollout.errors import BadAnswer, RequestRefused, RolloutTimeout
from skyrl.rollout.sending import error_of, parsed

POLL_S = 0.2
ANSWER_S = 10.0


async def abort_until_idle(
    session: aiohttp.ClientSession, router_url: str, timeout_s: float, pending: Callable[[], int]
) -> None:
    """Return when no worker has a request and `pending()` is 0. Left out: workers that the router lists as unhealthy
    and that cannot be reached. A router that cannot be reached is asked again. Raises RolloutTimeout, with what each
    worker has left, RequestRefused (the router's) and BadAnswer."""
    left: dict[str, str] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    workers = await _workers(session, router_url)
                except (aiohttp.ClientError, TimeoutError) as error:
                    left = {router_url: f"{type(error).__name__} {error}".strip()}
                    await asyncio.sleep(POLL_S)
                    continue
                states = await asyncio.gather(*(_abort(session, url, healthy) for url, healthy in workers))
                left = {url: state for (url, _), state in zip(workers, states, strict=True) if state is not None}
                if not left and not pending():
                    return
                await asyncio.sleep(POLL_S)  # requests may reach a worker after its abort, so abort again
    except TimeoutError:
        waiting = ", ".join(f"{url}: {state}" for url, state in left.items()) or "no worker"
        raise RolloutTimeout(
            f"not idle {timeout_s:g} s after the abort: {waiting}; requests of this client: {pending()}"
        ) from None


async def _workers(session: aiohttp.ClientSession, router_url: str) -> list[tuple[str, bool]]:
    """The URL of each worker, and whether the router holds it for healthy."""
    try:
        listed = (await _ask(session, "GET", f"{router_url}/workers")).get("workers")
        return [(str(one["url"]).rstrip("/"), bool(one.get("is_healthy", True))) for one in listed]
    except (TypeError, KeyError, AttributeError) as error:
        raise BadAnswer("GET /workers: the answer lists no workers") from error


async def _abort(session: aiohttp.ClientSession, url: str, healthy: bool) -> str | None:
    """What the worker has left, in words; None if nothing."""
    try:
        await _ask(session, "POST", f"{url}/abort_request", {"abort_all": True})
        count = requests_in(await _ask(session, "GET", f"{url}/v1/loads?include=core"))
    except (aiohttp.ClientError, TimeoutError, RequestRefused) as error:
        return f"{type(error).__name__} {error}".strip() if healthy else None
    return f"{count} requests" if count else None


async def _ask(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with session.request(method, url, json=body, timeout=timeout, allow_redirects=False) as response:
        text = await response.read()
        if response.status != 200:
            raise RequestRefused(response.status, error_of(text)[0])
        return parsed(text) if method == "GET" else None


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
