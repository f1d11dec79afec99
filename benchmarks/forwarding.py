"""What forwarding a sample costs: the same load straight to a null upstream, and through skyrl in front of it.

Prompt 512 tokens, 64 generated. Absolute figures vary with the machine; ratios and CPU seconds are what to compare.
Usage: python benchmarks/forwarding.py [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from load import TinkerSamples, direct_sample, run_load

from skyrl.demo.server import DemoServer
from skyrl.inference.placement import free_port

RUNS = ((1, 300), (64, 4000), (512, 4000), (2048, 6000))


def api_process(server: DemoServer) -> int:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(child.pid for child in children if "skyrl.api.server" in child.cmdline())


async def measure(server: DemoServer, upstream_port: int, upstream_pid: int) -> list[dict[str, Any]]:
    tinker = TinkerSamples(server.port)
    await tinker.open("tiny")
    rows = []
    for concurrency, samples in RUNS:
        direct = await run_load(upstream_port, concurrency, samples, upstream_pid, direct_sample)
        tinker.next_run()
        forwarded = await run_load(server.port, concurrency, samples, api_process(server), tinker.sample)
        rows += [{"path": "direct", **direct.row()}, {"path": "forwarded", **forwarded.row()}]
        print(*(json.dumps(row) for row in rows[-2:]), sep="\n", flush=True)
    return rows


def run() -> list[dict[str, Any]]:
    port = free_port()
    script = Path(__file__).with_name("null_upstream.py")
    upstream = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        with tempfile.TemporaryDirectory() as state:
            url = f"http://127.0.0.1:{port}"
            server = DemoServer(
                Path(state), "--backend", "none", "--base-model", "tiny", "--external-inference-url", url
            )
            server.start()
            try:
                server.wait_api()
                return asyncio.run(measure(server, port, upstream.pid))
            finally:
                server.stop()
    finally:
        upstream.terminate()
        upstream.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = run()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
