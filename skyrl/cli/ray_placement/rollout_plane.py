"""The placement process of `skyrl rollout`: keeps the plane's vLLMs and their sidecars running on a Ray cluster, and
tells the plane's router of them.

A vLLM that starts after the weights were changed, or meanwhile, has its first weights, wherever it starts: its sidecar
is told so, and answers no client until an update. Two files in the plane's directory are for the next placement
process, if this one is killed: UPDATED remembers that the weights were changed, REGISTERED which sidecars the router
was told of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from skyrl.cli.launcher.inference_parts import ServerParts, wherever
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.ray_placement.lifecycle import Starts, end, live, run_servers, server_parts
from skyrl.cli.ray_placement.ray_server import RayServer
from skyrl.cli.ray_placement.scheduling import RayPlacement
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.inference.engine_kinds import RolloutVllm
from skyrl.inference.remote.sidecar import PATH
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.processes.runtime import PLACED, Runtime
from skyrl.runtime.processes.startup import CANNOT_START

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a sidecar is asked whether it was updated, and the router whether it has the sidecar."""
TIMEOUT_S = 5.0
UPDATED, REGISTERED = "updated", "registered.json"


class Workers:
    """The sidecars as workers of the router at `router_url`. `key` opens both, None if they are open."""

    def __init__(self, router_url: str, key: str | None, directory: Path) -> None:
        self._router = router_url
        self._updated = directory / UPDATED
        self._file = directory / REGISTERED
        self._registered: set[str] = set()
        self._left = set(json.loads(self._file.read_text())) if self._file.exists() else set[str]()
        """Sidecars that have ended and that the router may still have: those of a placement process that was killed,
        and those whose end the router could not be told."""
        self._have_changed = self._updated.exists()
        """Some vLLM of the plane got new weights."""
        self._is_disk_bad = False
        self._refused: dict[str, int] = {}
        """The status of each request that was not answered with success when it was last sent."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, trust_env=False)

    async def remove_left(self) -> None:
        """Have the router remove the sidecars that have ended, until cancelled."""
        while True:
            for url in tuple(self._left):
                if url not in self._registered and await self._remove(url):
                    self._left.discard(url)
                    self._note(self._registered)
            await asyncio.sleep(POLL_S)

    async def serve(self, server: RayServer, url: str) -> None:
        """Have the router use the sidecar of the server at `url`, until cancelled; then the router breaks off what is
        in flight there."""
        sidecar = server.sidecar_url
        assert sidecar is not None
        try:
            await self._begin(server, sidecar)
            was_updated = False
            while True:
                was_updated = await self._look(sidecar, was_updated=was_updated)
                await asyncio.sleep(POLL_S)
        finally:
            if not await self._remove(sidecar):
                logger.info("the router was not told that %s has ended: it is told later", sidecar)
                self._left.add(sidecar)
            self._note(self._registered - {sidecar})
            self._refused = {request: status for request, status in self._refused.items() if sidecar not in request}

    async def _begin(self, server: RayServer, sidecar: str) -> None:
        """Return when vLLM has started, and its sidecar knows it if others have newer weights."""
        await self._until_answered("GET", f"{sidecar}/health")
        waits = ""
        if self._have_changed:
            await self._until_answered("POST", f"{sidecar}{PATH}")
            waits = ", with its first weights: it waits for an update"
        logger.info("%s has started at %s%s", server.name, sidecar, waits)

    async def _look(self, sidecar: str, *, was_updated: bool) -> bool:
        """Learn of an update, tell the sidecar of one that it has missed, and see that the router has the sidecar.
        Returns whether this start of vLLM was updated."""
        try:
            answer = await self._http.get(f"{sidecar}{PATH}")
            if self._is_success(answer) and answer.json()["updated"]:
                was_updated = True
                self._note_update()
            elif self._have_changed and not was_updated:
                # The update came after this start's beginning, or the sidecar was started again and has forgotten it
                told = await self._http.post(f"{sidecar}{PATH}")
                if not self._is_success(told):
                    return False
            listed = await self._http.get(f"{self._router}/workers")
            if self._is_success(listed) and sidecar not in [worker["url"] for worker in listed.json()["workers"]]:
                self._left.discard(sidecar)
                self._note(self._registered | {sidecar})
                told = await self._http.post(f"{self._router}/workers", json={"url": sidecar, "starting": True})
                self._is_success(told)
        except (httpx.RequestError, ValueError, KeyError, TypeError) as error:
            logger.debug("%s or the router does not answer: %s", sidecar, error)
        return was_updated

    def _note_update(self) -> None:
        self._have_changed = True
        try:
            self._updated.touch()
        except OSError as error:
            if not self._is_disk_bad:
                logger.warning("%s cannot be written; the next placement process needs it: %s", self._updated, error)
            self._is_disk_bad = True
        else:
            self._is_disk_bad = False

    async def _until_answered(self, method: str, url: str) -> None:
        while True:
            try:
                if self._is_success(await self._http.request(method, url)):
                    return
            except httpx.RequestError:
                pass  # it is starting
            await asyncio.sleep(POLL_S)

    async def _remove(self, sidecar: str) -> bool:
        """Whether the router was told."""
        try:
            params = {"url": sidecar, "ended": "true"}
            return self._is_success(await self._http.post(f"{self._router}/remove_worker", params=params))
        except httpx.RequestError:  # its own probes find out, and when all stops it is gone already
            return False

    def _is_success(self, answer: httpx.Response) -> bool:
        """Another status is logged, once until it changes. 503 is no failure: vLLM is starting, or an update runs."""
        request = f"{answer.request.method} {answer.url.copy_with(query=None)}"
        if answer.is_success:
            self._refused.pop(request, None)
        elif self._refused.get(request) != answer.status_code:
            self._refused[request] = answer.status_code
            level = logging.INFO if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else logging.WARNING
            logger.log(level, "%s is answered with %d: %s", request, answer.status_code, answer.text[:300])
        return answer.is_success

    def _note(self, registered: set[str]) -> None:
        self._registered = registered
        _write(self._file, sorted(registered | self._left))

    async def close(self) -> None:
        await self._http.aclose()


def write_placed(file: Path, servers: Sequence[RayServer]) -> None:
    """Tell the launcher where each server runs, or why it does not."""
    placed = {server.name: server.reason or f"runs on node {server.node}" for server in servers}
    _write(file, placed)


def _write(file: Path, value: Any) -> None:
    scratch = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        scratch.write_text(json.dumps(value))
        scratch.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written: %s", file, error)


async def run(runtime: Runtime) -> None:
    """Place the vLLMs until SIGTERM or SIGINT. Ends the process when no vLLM can start, or when the cluster is away."""
    assert runtime.ray_address is not None
    assert runtime.inference_url is not None
    client_key, admin_key = os.environ.get(ROUTER_KEY_VARIABLE) or None, os.environ.get(ADMIN_KEY_VARIABLE) or None
    metrics, starts = LauncherMetrics.new(), Starts()
    placement = RayPlacement(
        runtime.config.state_dir / "logs", lambda: write_placed(runtime.directory / PLACED, placement.servers)
    )
    workers = Workers(runtime.inference_url, admin_key or client_key, runtime.directory)
    kind = RolloutVllm(runtime.config, runtime.inference_api_key or "", client_key=client_key, admin_key=admin_key)
    try:
        async with publishing(metrics.registry, "placement", runtime.metrics_directory):
            starts.servers = server_parts(runtime, kind, placement, starts, metrics)
            serving = [partial(_serve, workers, parts) for parts in starts.servers]
            hopeless = await run_servers(runtime.ray_address, starts, (metrics.lag.run, workers.remove_left, *serving))
    finally:
        await workers.close()
    if hopeless is not None:
        end(CANNOT_START, hopeless.sentence)


async def _serve(workers: Workers, parts: ServerParts) -> None:
    server = parts.server
    assert isinstance(server, RayServer)
    await wherever(server, partial(workers.serve, server))


def main() -> None:
    live(run, lambda _: None)


if __name__ == "__main__":
    main()
