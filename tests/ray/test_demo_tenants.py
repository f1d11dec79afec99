"""The demo's two tenants on three nodes, with vLLMs and the trainer's ranks on all of them: one node is killed in the
middle, both tenants end without an error, and both have learned."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.run import BACKEND_CONFIG, BASE_MODEL
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.demo.tenants import Run, Tenant
from tests.servers import SLOW_START_S

from .machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

PLACED = {
    "generator.inference_engine.num_engines": 2,
    "trainer.placement.policy_num_cpu_ranks": 2,
}
"""Four processes with a CPU each. Three nodes have six CPUs, so two nodes hold all of them."""
SETTINGS = Settings(steps=26)
KILLED_AT = 8
"""The step of the first tenant at which a node is killed."""
JUDGED = 10


def test_a_killed_node_costs_the_demos_tenants_no_error(tmp_path: Path) -> None:
    with machines() as cluster:
        for _ in range(3):
            cluster.add(cpus=2)
        flags = ("--ray-address", cluster.address, "--checkpoint-store", f"file://{tmp_path / 'store'}")
        server = DemoServer(tmp_path / "server", *flags, backend_config=BACKEND_CONFIG | PLACED)
        tenants = [Tenant("A", "count", tmp_path), Tenant("B", "sort", tmp_path)]
        server.start()
        try:
            print(f"ready after {server.wait_ready(SLOW_START_S):.1f} s")
            for tenant in tenants:
                tenant.wait_up()
                tenant.start(server.url, BASE_MODEL, SETTINGS)
            runs = {tenant.name: Run() for tenant in tenants}
            far_enough = threading.Event()
            with ThreadPoolExecutor(len(tenants)) as pool:
                began = time.monotonic()
                followed = [
                    pool.submit(
                        tenant.follow,
                        runs[tenant.name],
                        lambda: far_enough.set() if len(runs["A"].rewards) >= KILLED_AT else None,
                    )
                    for tenant in tenants
                ]
                assert far_enough.wait(SLOW_START_S)
                victim = next(node for node in cluster.nodes.values() if node.vllms() and node.ranks())
                victim.kill()
                print(f"killed node {victim.address} after {time.monotonic() - began:.1f} s")
                for each in followed:
                    each.result()
            for name, run in runs.items():
                steps = [sampled + trained for sampled, trained in zip(run.sample_s, run.train_s, strict=True)]
                print(f"tenant {name}: {run.seconds:.1f} s, longest step {max(steps):.1f} s, {run.samples} samples")
                assert len(run.rewards) == SETTINGS.steps
                assert run.gain(JUDGED) > 0
        finally:
            for tenant in tenants:
                tenant.stop()
            server.stop()
