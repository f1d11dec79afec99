"""What a tenant feels while another one attacks, and how much of the disk that one fills.

    python -m benchmarks.hostile [--against COMMIT] [--quick] [--only ATTACK ...] [--out FILE]

A real `skyrl serve` with the tiny model, its engine and vLLM. The victim sends a sample of 8 tokens, a heartbeat, and a
pass of 100 kB to a model that it does not have, one after the other, first alone and then beside each attack, and one
sample when the attack has ended. An attack is a process with a valid key of its own, and AT_ONCE connections:

    passes    training passes of 1 MiB behind a number that never comes: each stays in the database
    sessions  sessions that are created with 15 kB of metadata, and finished
    agents    agent sessions that are created with 15 kB of metadata, and ended
    results   samples with the scores of their prompts, which nobody reads
    slow      training passes of 256 MiB, of which 128 KiB arrive in a second
    headers   requests of 60 kB that consist of headers

`min_free_disk_bytes` leaves the servers KEPT_BYTES of the disk, so that a share of it is met in some seconds. With
`--against` a server of that commit takes turns with this one, so that other load on the machine meets both.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from tempfile import gettempdir
from typing import Any

import aiohttp

from benchmarks import program
from benchmarks.processes import forget_peak_of, parts_of, peak_resident_mb
from benchmarks.series import quantile
from benchmarks.stage import server_of
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.supervision import dies_with_parent

AT_ONCE = 16
KEPT_BYTES = 160 * 2**20
MB = 2**20
NOTE = {"note": "x" * 15_000}
PARAMS = {"num_samples": 1, "sampling_params": {"max_tokens": 8, "temperature": 1.0}}
ENDED: dict[str, Any] = {
    "sessions": ("create_session", ("sessions", "finish"), {"tags": [], "sdk_version": "1", "user_metadata": NOTE}),
    "agents": ("agent_sessions", ("agent_sessions", "end"), {"model": "tiny", "metadata": NOTE}),
}
ATTACKS, MANY = ("passes", *ENDED, "results", "slow", "headers"), {f"h{number}": "" for number in range(7_000)}
PASS = b" " * 100_000 + b'{"model_id": "x", "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "x"}}'


class Tenant:
    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http, self._headers = http, {"X-API-Key": key}
        self.statuses: Counter[int] = Counter()

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        return await self.send(path, {}, json=body)

    async def send(self, path: str, headers: dict[str, str], **body: Any) -> dict[str, Any]:
        async with self._http.post(f"/api/v1/{path}", headers=self._headers | headers, **body) as answer:
            self.statuses[answer.status] += 1
            return await answer.json()

    async def prepare(self) -> None:
        self.session = (await self.post("create_session", tags=[], sdk_version="1"))["session_id"]
        own = {"session_id": self.session, "base_model": "tiny"}
        await self.post("create_sampling_session", sampling_session_seq_id=0, **own)
        await self.post("create_model", model_seq_id=0, lora_config={"rank": 8}, **own)

    async def sample(self, number: int, tokens: int, **fields: Any) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5 + (number + i) % 200 for i in range(tokens)]}]}
        about = {
            "sampling_session_id": f"{self.session}:sample:0",
            "seq_id": number,
            "prompt": prompt,
        }
        return await self.post("asample", **about, **PARAMS, **fields)

    async def attack(self, name: str, number: int) -> None:
        if name == "passes":
            about = {"model_id": f"{self.session}:train:0", "seq_id": number + 9}
            await self.post("forward_backward", forward_backward_input={"data": [], "loss_fn": "x" * MB}, **about)
        elif name == "results":
            await self.sample(number, 100, prompt_logprobs=True, topk_prompt_logprobs=20)
        elif name == "slow":
            await self.send("forward_backward", {"Content-Length": str(256 * MB)}, data=slowly())
        elif name == "headers":
            await self.send("session_heartbeat", MANY)
        else:
            path, end, body = ENDED[name]
            if (session := (await self.post(path, **body)).get("session_id")) is not None:
                await self.post(f"{end[0]}/{session}/{end[1]}")


async def slowly() -> AsyncGenerator[bytes]:
    while True:
        yield bytes(MB // 8)
        await asyncio.sleep(1)


async def attack(name: str, url: str, seconds: float) -> dict[int, int]:
    """Statuses of the attacker's requests."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        tenant, end, numbers = Tenant(http, f"tml-{name}"), time.monotonic() + seconds, iter(range(1, 10**9))
        await tenant.prepare()

        async def many() -> None:
            while time.monotonic() < end:
                with suppress(aiohttp.ClientError):  # the server has closed the connection
                    await tenant.attack(name, next(numbers))

        with suppress(TimeoutError):  # some requests do not end by themselves
            await asyncio.wait_for(asyncio.gather(*(many() for _ in range(AT_ONCE))), seconds)
        return dict(tenant.statuses)


async def victim(url: str, seconds: float) -> tuple[dict[str, list[float]], dict[int, int]]:
    """Milliseconds of samples, heartbeats and passes, and statuses that are failures."""
    times: dict[str, list[float]] = {"sample": [], "heartbeat": [], "pass": []}
    async with aiohttp.ClientSession(url) as http:
        tenant, end = Tenant(http, "tml-victim"), time.monotonic() + seconds
        await tenant.prepare()
        while time.monotonic() < end or not times["sample"]:
            at = [time.perf_counter()]
            request = (await tenant.sample(len(times["sample"]) + 1, 8)).get("request_id")
            while (await tenant.post("retrieve_future", request_id=request)).get("type") == "try_again":
                pass
            at.append(time.perf_counter())
            await tenant.post("session_heartbeat", session_id=tenant.session)
            at.append(time.perf_counter())
            await tenant.send("forward_backward", {"Content-Type": "application/json"}, data=PASS)
            at.append(time.perf_counter())
            for number, each in enumerate(times.values()):
                each.append(1e3 * (at[number + 1] - at[number]))
        await tenant.post(f"sessions/{tenant.session}/finish")
    return times, {status: n for status, n in tenant.statuses.items() if status not in (200, 404, 408)}


def run(server: DemoServer, name: str | None, seconds: float) -> dict[str, Any]:
    """The victim beside an attack, or alone. Times in milliseconds."""
    api, before, statuses = parts_of(server.pid)["api"], _stored(server), {}
    forget_peak_of(api)
    if name is None:
        times, failed = asyncio.run(victim(server.url, seconds))
    else:
        command = [sys.executable, "-m", "benchmarks.hostile", "--attack", name, server.url, str(seconds + 2)]
        with subprocess.Popen(dies_with_parent(command), stdout=subprocess.PIPE) as process:
            time.sleep(2)
            times, failed = asyncio.run(victim(server.url, seconds))
            statuses = json.loads(process.communicate()[0])
    found: dict[str, Any] = {"attack": name, "attacker": statuses, "failed": failed}
    for what, each in times.items():
        found |= {f"{what}_p50": quantile(each, 0.5), f"{what}_p99": quantile(each, 0.99)}
    size, api_mb = (_stored(server) - before) / MB, peak_resident_mb(api)
    return found | {"grown_mb": size, "api_mb": api_mb, "after": asyncio.run(victim(server.url, 0))[0]["sample"][0]}


def _stored(server: DemoServer) -> int:
    return sum(file.stat().st_size for file in server.state_dir.glob("skyrl.db*"))


def main() -> None:
    parser = program.parser("hostile", __doc__, out="bench/hostile.json", quick="windows of 4 s, not 10", against=True)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        spare = max(0, shutil.disk_usage(gettempdir()).free - KEPT_BYTES)
        roots = program.builds(options.against, stack)
        servers = {name: server_of(stack, root=root, min_free_disk_bytes=spare) for name, root in roots.items()}
        for server in servers.values():
            server.wait_ready(400)
        for name in (None, *options.only):
            for side, server in servers.items():
                found.append({"side": side} | run(server, name, 4 if options.quick else 10))
                print(json.dumps(found[-1]), flush=True)
    program.write(options.out, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        print(json.dumps(asyncio.run(attack(sys.argv[2], sys.argv[3], float(sys.argv[4])))))
    else:
        main()
