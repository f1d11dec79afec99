"""How long a save for sampling and the first sample from it take, by the way that the adapter takes to vLLM.

Ways: the state directory (no Ray); a checkpoint store in a local directory; a checkpoint store on S3 (moto's server on
this machine, in another process). Three servers take turns, each with the tiny model and one vLLM; the last two use
Ray. Then: how long a node takes for a large adapter in a local store, when it links the
files and when it copies them from another file system.

Usage: python -m benchmarks.travel [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from benchmarks.machine import facts
from skyrl.cli.demo.server import DemoServer
from skyrl.inference.remote.cache import NodeCache
from skyrl.runtime.processes.ports import free_port
from skyrl.storage.checkpoint_store.adapters import is_adapter
from skyrl.storage.checkpoint_store.local import LocalStore

KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
LARGE_BYTES = 350 * 2**20
"""An adapter of rank 32 for a model of 8B parameters in float32."""


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[list[str], dict[str, str]]]:
    """Flags and options for a server whose store is a bucket of a new S3 server."""
    import boto3

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port}"
        boto3.client("s3", endpoint_url=url, region_name="us-east-1", **KEYS).create_bucket(Bucket="bench")
        options = {"endpoint": url, "region": "us-east-1", **KEYS}
        yield ["--checkpoint-store", "s3://bench/prefix"], options
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def trainer_of(flags: list[str], options: dict[str, str]) -> Iterator[tinker.TrainingClient]:
    """A model on a new server with these flags and this store's options."""
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "skyrl.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        config.write_text("[checkpoint_store_options]\n" + "\n".join(lines) + "\n" if options else "")
        server = DemoServer(Path(name) / "state", *flags, "--config", str(config))
        server.start()
        try:
            server.wait_ready(300.0)
            with tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as client:
                yield client.create_lora_training_client(base_model="tiny", rank=32).result()
        finally:
            server.stop()


def round_of(training: tinker.TrainingClient) -> tuple[float, float]:
    """Seconds of a save, and of the first sample from what was saved."""
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=1, temperature=0.0)
    began = time.perf_counter()
    sampler = training.save_weights_and_get_sampling_client().result()
    saved = time.perf_counter()
    sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    return saved - began, time.perf_counter() - saved


def times_of(trainers: dict[str, tinker.TrainingClient], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds by way. The ways take turns, so that they share the machine's moods."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in trainers}
    for number in range(rounds + 2):
        for way, training in trainers.items():
            took = round_of(training)
            if number >= 2:  # the first ones make connections
                times[way].append(took)
    return {
        way: {
            "save_ms": _median_ms([save for save, _ in took]),
            "first_sample_ms": _median_ms([sample for _, sample in took]),
            "both_least_ms": round(min(map(sum, took)) * 1000, 1),
        }
        for way, took in times.items()
    }


def large_adapter() -> dict[str, float]:
    """Milliseconds until a node has a large adapter of a local store: linked, and copied from another file system."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        store = LocalStore(Path(here) / "store")
        with store.writing("adapters-m/v000001") as directory:
            (directory / "adapter_config.json").write_text("{}")
            (directory / "adapter_model.safetensors").write_bytes(os.urandom(LARGE_BYTES))
        for way, root in (("linked_ms", here), ("copied_ms", elsewhere)):
            times: list[float] = []
            for number in range(3):
                cache = NodeCache(store, Path(root) / f"node-{number}", 2**40, is_adapter)
                cache.open()
                began = time.perf_counter()
                cache.fetch("adapters-m/v000001")
                times.append(time.perf_counter() - began)
                cache.release("adapters-m/v000001")
                cache.close()
            found[way] = _median_ms(times)
    return found


def _median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.travel", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    ray = ["--ray-address", "local"]
    result: dict[str, Any] = {"machine": facts()}
    with contextlib.ExitStack() as servers:
        flags, options = servers.enter_context(s3_server())
        ways = {
            "state_directory": ([], {}),
            "local_store": (ray, {}),
            "s3": ([*ray, *flags], options),
        }
        trainers = {way: servers.enter_context(trainer_of(*given)) for way, given in ways.items()}
        result |= times_of(trainers, rounds)
    result["large_adapter"] = large_adapter()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
