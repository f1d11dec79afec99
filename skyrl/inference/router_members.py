"""Tells the router which replicas it may use.

Knows the router's routes for workers. Does not know when a replica may be used (`engine_group` does), and sends no
samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import httpx

REPEAT_S = 2.0
"""How often the router is told the same again: a router that was started again may have lost it."""
TIMEOUT_S = 2.0


class NotTold(Exception):
    """The router was not told, or has refused. The text says why."""


class Members(Protocol):
    """The membership of replicas behind one URL."""

    async def update(self, used: Collection[str], left_out: Collection[str]) -> None:
        """Use the replicas at the URLs `used`, and send nothing new to those at `left_out`. Other replicas keep their
        places. Raises NotTold; a later call tries again."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Told:
    used: bool
    at: float


class RouterMembers:
    """The members of the router at `url`. `key` is the router's key.

    Each replica is registered so that the router uses it again only after another registration, once it has stopped to
    answer: before that the replica may lack adapters.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._told: dict[str, _Told] = {}
        """By URL of a replica: what the router was told last."""
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            trust_env=False,  # no proxy: the router is on loopback
        )

    async def update(self, used: Collection[str], left_out: Collection[str]) -> None:
        """As `Members.update`. Sends nothing that the router was told within REPEAT_S seconds."""
        changes = [(url, True) for url in used] + [(url, False) for url in left_out]
        self._told = {url: told for url, told in self._told.items() if url in {url for url, _ in changes}}
        now = time.monotonic()
        due = [(url, use) for url, use in changes if self._is_due(url, use, now)]
        outcomes = await asyncio.gather(*(self._tell(url, use) for url, use in due), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _is_due(self, url: str, use: bool, now: float) -> bool:
        told = self._told.get(url)
        return told is None or told.used != use or now - told.at >= REPEAT_S

    async def _tell(self, url: str, use: bool) -> None:
        try:
            if use:
                answer = await self._http.post("/workers", json={"url": url, "revive": "registration"})
            else:
                answer = await self._http.post("/remove_worker", params={"url": url})
        except httpx.RequestError as error:
            raise NotTold(f"the router at {self._url} does not answer ({error or type(error).__name__})") from error
        unknown = not use and answer.status_code == httpx.codes.NOT_FOUND
        if not answer.is_success and not unknown:
            raise NotTold(f"the router at {self._url} answers {answer.status_code} {answer.text[:200]}")
        self._told[url] = _Told(use, time.monotonic())

    async def close(self) -> None:
        await self._http.aclose()
