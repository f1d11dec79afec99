"""Measures the cost and the gain of vLLM's priorities. Two servers take turns: one with priorities, one first come,
first served.

`alone`: one tenant queues all its samples at once; measured is the time of the last one. `beside`: one tenant queues as
many, then another tenant queues a few; measured are the time of the few, and how many samples of the first tenant have
ended before them.

Usage: python -m benchmarks.fairness [--rounds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import facts
from benchmarks.payloads import Client
from benchmarks.processes import cpu_seconds, parts_of
from benchmarks.prompts import prompt
from skyrl.cli.demo.server import DemoServer

POLICIES = ("fcfs", "priority")
MANY, FEW = 300, 10
PROMPT_TOKENS, MAX_TOKENS = 16, 64
AT_ONCE = 16
"""The number of sequences that vLLM runs at once."""


class Tenant:
    """One API key with a sampling client of the base model."""

    def __init__(self, server: DemoServer, key: str) -> None:
        self._server, self._key = server, key
        client = Client(server.port, key)
        session = json.loads(client.post("create_session", {"tags": [], "sdk_version": "0"}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self._sampler = json.loads(client.post("create_sampling_session", body))["sampling_session_id"]
        self._client = client
        self._number = 0

    def queue(self, count: int) -> list[str]:
        """Submit `count` samples; returns their request ids."""
        return [self._submit() for _ in range(count)]

    def _submit(self) -> str:
        self._number += 1
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": self._number,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt(self._number, PROMPT_TOKENS)}]},
            "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": self._number, "stop": []},
        }
        return self._client.submit("asample", body)

    def ends(self, request_ids: list[str]) -> list[float]:
        """The time at which each sample's poll was answered, by the clock of this process. All polls wait at once."""

        def wait(request_id: str) -> float:
            client = Client(self._server.port, self._key)
            result = client.result(request_id)
            ended = time.perf_counter()
            client.close()
            if b'"error"' in result:
                raise RuntimeError(result[:300])
            return ended

        with ThreadPoolExecutor(len(request_ids)) as waiting:
            return list(waiting.map(wait, request_ids))


def inference_cpu_seconds(server: DemoServer) -> float:
    """CPU time of vLLM's processes so far: all children of the launcher but skyrl's own."""
    skyrl_pids = set(parts_of(server.pid).values())
    children = psutil.Process(server.pid).children(recursive=True)
    return sum(cpu_seconds(child.pid) for child in children if child.pid not in skyrl_pids)


def alone(server: DemoServer, tenant: Tenant) -> dict[str, float]:
    began, used = time.perf_counter(), inference_cpu_seconds(server)
    last = max(tenant.ends(tenant.queue(MANY)))
    return {"seconds": last - began, "vllm_cpu_s": inference_cpu_seconds(server) - used}


def beside(many: Tenant, few: Tenant) -> dict[str, float]:
    queued = many.queue(MANY)
    with ThreadPoolExecutor(1) as thread:
        waiting_for_many = thread.submit(many.ends, queued)
        began = time.perf_counter()
        last_of_few = max(few.ends(few.queue(FEW)))
        ends_of_many = waiting_for_many.result()
    return {"few_waited_s": last_of_few - began, "ended_before": float(sum(end < last_of_few for end in ends_of_many))}


def run(rounds: int) -> list[dict[str, Any]]:
    """One row for each measurement. Each round measures both policies; their order alternates."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        tenants: dict[str, tuple[DemoServer, Tenant, Tenant]] = {}
        for policy in POLICIES:
            state = stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-fairness-"))
            inference = {"max_num_seqs": AT_ONCE, "engine_init_kwargs": {"scheduling_policy": policy}}
            server = DemoServer(Path(state), backend_config={"generator": {"inference_engine": inference}})
            stack.callback(server.stop)
            server.start()
            server.wait_ready()
            tenants[policy] = server, Tenant(server, "tml-many"), Tenant(server, "tml-few")
        for server, many, _ in tenants.values():
            alone(server, many)  # warm-up
        for number in range(rounds):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                server, many, few = tenants[policy]
                row = {"policy": policy, "round": number, **alone(server, many), **beside(many, few)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    measured = ("seconds", "vllm_cpu_s", "few_waited_s", "ended_before")
    return {
        policy: {name: statistics.median(row[name] for row in rows if row["policy"] == policy) for name in measured}
        for policy in POLICIES
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = facts()
    found = run(options.rounds)
    by_policy = medians(found)
    print(json.dumps(by_policy, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({"facts": machine, "medians": by_policy, "rows": found}, indent=1) + "\n")
