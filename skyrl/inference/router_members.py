"""Tells the router which replicas it may use.

Knows the router's routes for workers. Does not know when a replica may be used (`engine_group` does), and sends no
samples.
"""

from __future__ import annotations

from collections.abc import Collection

import httpx
import msgspec

TIMEOUT_S = 2.0


class NotTold(Exception):
    """The router was not told, or has refused. The text says why."""


class _Worker(msgspec.Struct):
    url: str
    state: str


class _Status(msgspec.Struct):
    workers: list[_Worker]


_decode_status = msgspec.json.Decoder(_Status).decode
USED, LEAVING = "healthy", "draining"
"""States of the router's workers."""


class RouterMembers:
    """The members of the router at `url`. `key` is the router's key.

    Each replica is registered so that the router uses it again only after another registration, once it has ceased to
    answer: before that the replica may lack adapters.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            trust_env=False,  # no proxy: the router is on loopback
        )

    async def update(
        self, used: Collection[str], left_out: Collection[str], running: Collection[str] | None = None
    ) -> None:
        """Use the replicas at the URLs `used`, and send nothing new to those at `left_out`. `running` are the URLs of
        all servers that run, or None while they are not known: a server that is not among them has ended, and the
        requests that are in flight there are broken off. Other replicas keep their places. Raises NotTold; a later call
        tries again.

        Asks the router first, and tells it only what differs: a router that was started again may have lost its
        workers, and a registration that changes nothing would hide probes that have failed."""
        try:
            answer = self._checked(await self._http.get("/statusz"))
            state_of = {worker.url: worker.state for worker in _decode_status(answer.content).workers}
            for url in used:
                if state_of.get(url) != USED:
                    self._checked(await self._http.post("/workers", json={"url": url, "revive": "registration"}))
            for url in state_of:  # also a draining one, which waits for its last requests
                if running is not None and url not in running:
                    params = {"url": url, "ended": "true"}
                    self._checked(await self._http.post("/remove_worker", params=params))
            for url in left_out:
                if state_of.get(url, LEAVING) != LEAVING:
                    self._checked(await self._http.post("/remove_worker", params={"url": url}))
        except httpx.RequestError as error:
            raise NotTold(
                f"the router at {self._url} does not answer ({str(error) or type(error).__name__})"
            ) from error
        except msgspec.DecodeError as error:
            raise NotTold(f"the router at {self._url} answers /statusz with something else ({error})") from error

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if not answer.is_success:
            raise NotTold(f"the router at {self._url} answers {answer.status_code} {answer.text[:200]}")
        return answer

    async def close(self) -> None:
        await self._http.aclose()
