"""The inference servers that get new weights, over HTTP: sidecars, and SGLang's own servers.

Each server is asked by itself, so the answer of each is known. Sidecars stage an update while they sample. SGLang's
servers do not: they ignore fields that they do not know, and load at once. `VersionOnDisk` is the medium of a whole
checkpoint that the servers find by themselves: on their disk, or by a reference. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import httpx

PauseMode = Literal["abort", "retract", "in_place"]
UPDATE_S = 600.0
SHORT_S = 30.0
PAUSE_S = 60.0
"""The most that a server may take to pause or to go on. One that hangs keeps all others paused meanwhile."""


class WorkersFailed(RuntimeError):
    """`failed` has the message of each server that failed, `answered` the answer of each that did not. The others may
    have new weights already: `Workers.versions` tells. `refused` are those that failed by an answer, and may work
    well."""

    def __init__(
        self, path: str, failed: Mapping[str, str], answered: Mapping[str, Any], refused: Collection[str] = ()
    ) -> None:
        super().__init__(f"{path}: " + "; ".join(f"{url}: {message}" for url, message in failed.items()))
        self.failed = dict(failed)
        self.answered = dict(answered)
        self.refused = frozenset(refused)


class NotStaged(RuntimeError):
    """A server would load each part of an update at once, while it samples. SGLang's servers do."""


class Workers:
    """`urls` without a slash at the end. `key` is the admin key. Opens its connections for each call, so it may be used
    from any event loop."""

    def __init__(self, urls: Sequence[str], key: str | None = None, update_s: float = UPDATE_S) -> None:
        if not urls:
            raise ValueError("urls: there is no server")
        self.urls = tuple(urls)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._update_s = update_s

    @classmethod
    async def behind(cls, router: str, key: str | None = None, update_s: float = UPDATE_S) -> Workers:
        """The servers that a router knows now, except those that it counts as dead. Raises WorkersFailed."""
        answers = await cls([router.rstrip("/")], key)._each("GET", "/workers", SHORT_S)
        listed = next(iter(answers.values()))["workers"]
        return cls([worker["url"] for worker in listed if not worker.get("is_dead")], key, update_s)

    async def post(
        self,
        path: str,
        body: Any = None,
        bodies: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = math.inf,
    ) -> dict[str, Any]:
        """Ask all servers at once, with one body or with a body for each URL. The answer of each. Raises WorkersFailed
        when a server does not answer in `timeout_s` or `update_s`, answers with an error, or with success false."""
        within = min(timeout_s, self._update_s)
        return await self._each("POST", path, within, bodies or dict.fromkeys(self.urls, body or {}))

    async def versions(self) -> dict[str, str]:
        """The version of the weights of each server. Raises WorkersFailed."""
        answers = await self._each("GET", "/model_info", SHORT_S)
        return {url: answer["weight_version"] for url, answer in answers.items()}

    async def ranks(self) -> dict[str, int]:
        """How many processes of each server hold weights. Raises WorkersFailed."""
        answers = await self._each("GET", "/server_info", SHORT_S)
        return {url: int(one.get("tp_size") or 1) * int(one.get("pp_size") or 1) for url, one in answers.items()}

    async def that_stage(self) -> Workers | None:
        """The servers that stage an update, as sidecars do; None if there is none. Raises WorkersFailed for a server
        that does not answer."""
        try:
            answers = await self._each("GET", "/v1/loads", SHORT_S)
        except WorkersFailed as error:
            if not error.refused >= error.failed.keys():
                raise
            answers = error.answered
        stage = [url for url in self.urls if _stages(answers.get(url))]
        if not stage:
            return None
        some = Workers(stage, update_s=self._update_s)
        some._headers = self._headers
        return some

    async def check_all_stage(self, what: str) -> None:
        """Raises NotStaged for servers that load at once: `what` needs servers that stage. WorkersFailed."""
        stage = await self.that_stage()
        if others := [url for url in self.urls if stage is None or url not in stage.urls]:
            raise NotStaged(
                f"{', '.join(others)}: stages no updates, and would load new weights at once; {what} needs sidecars. "
                "CheckpointOnDisk can be used"
            )

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode | None) -> AsyncIterator[None]:
        """No server samples during the body. None: nothing happens. Raises WorkersFailed."""
        if mode is None:
            yield
            return
        try:
            await self.post("/pause_generation", {"mode": mode}, timeout_s=PAUSE_S)
            yield
        except BaseException as error:
            try:
                await self.post("/continue_generation", timeout_s=PAUSE_S)
            except WorkersFailed as paused:  # one whose weights are broken stays paused
                error.add_note(f"Some servers are still paused: {paused}")
            raise
        await self.post("/continue_generation", timeout_s=PAUSE_S)

    async def _each(
        self, method: str, path: str, timeout_s: float, bodies: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            headers=self._headers, timeout=None, limits=limits, trust_env=False, follow_redirects=True, verify=_tls()
        ) as client:
            asked = (_ask(client, method, url + path, (bodies or {}).get(url), timeout_s) for url in self.urls)
            outcomes = dict(zip(self.urls, await asyncio.gather(*asked), strict=True))
        failed = {url: outcome for url, outcome in outcomes.items() if isinstance(outcome, _Failure)}
        answered = {url: outcome for url, outcome in outcomes.items() if url not in failed}
        if failed:
            refused = [url for url, failure in failed.items() if failure.refused]
            raise WorkersFailed(path, {url: one.message for url, one in failed.items()}, answered, refused)
        return answered


@dataclass
class _Failure:
    """`refused`: the server has answered, and not that it, or its vLLM, is away."""

    message: str
    refused: bool = False


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Made once: that takes 20 ms."""
    return ssl.create_default_context()


async def _ask(client: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.request(method, url, json=body)
    except TimeoutError:
        return _Failure("no answer in time")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _Failure(str(error) or type(error).__name__)
    try:
        value = answer.json()
    except ValueError:
        value = None
    if answer.status_code >= 400:
        message = _message(value) or f"{answer.status_code} {answer.text[:1000]}"
        return _Failure(message, refused=answer.status_code not in (502, 503, 504))
    if isinstance(value, dict) and value.get("success") is False:
        return _Failure(_message(value) or "success is false", refused=True)
    return value


def _stages(loads: Any) -> bool:
    return isinstance(loads, dict) and loads.get("stages_updates") is True


def _message(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    error = value.get("error")
    return str(value.get("message") or (error.get("message") if isinstance(error, dict) else error) or "")


class VersionOnDisk:
    """The only part is the absolute path of the checkpoint, which must stay until `finish` has returned; or a reference
    for sidecars that bring files to their node. With the pause `in_place`, samples in flight keep their cache, with the
    other pauses they compute it again; without a pause the servers refuse while samples are in flight. `keep`: the
    servers keep the version's bytes, so that the next one may have it as its `base`, and only the elements that differ
    (`skyrl.weights.deltas`). `checksums`: of the version's tensors. The last three need sidecars.

    Sidecars read and check the files before the pause. SGLang's servers read them in the pause, because they load at
    once; without a pause they wait for the end of their samples."""

    def __init__(
        self,
        workers: Workers,
        pause: PauseMode | None = "in_place",
        *,
        keep: bool = False,
        base: str | None = None,
        checksums: dict[str, str] | None = None,
    ) -> None:
        given = keep or base is not None or checksums is not None
        self._more: dict[str, object] = {"keep": keep, "base": base, "checksums": checksums} if given else {}
        self._workers = workers
        self._pause: PauseMode | None = pause
        self._version = ""
        self._body: dict[str, object] | None = None

    async def begin(self, version: str) -> None:
        self._version, self._body = version, None

    async def send(self, part: Path | str) -> None:
        """Sidecars read and check the files while they sample. Raises WorkersFailed, NotStaged."""
        self._body = {
            "model_path": str(part),
            "weight_version": self._version,
            "flush_cache": self._pause != "in_place",
        } | self._more
        if self._more:
            await self._workers.check_all_stage("a version of changes, or with checksums,")
        if (stage := await self._workers.that_stage()) is not None:
            await stage.post("/update_weights_from_disk", self._body | {"stage_only": True})

    async def finish(self) -> None:
        """The pause is for the moment in which the weights change. Raises WorkersFailed."""
        assert self._body is not None
        async with self._workers.paused(self._pause):
            await self._workers.post("/update_weights_from_disk", self._body)

    async def abandon(self) -> None:
        """Servers forget what they have read when they read anything else."""
