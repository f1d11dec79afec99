"""How many CPU threads the trainer and vLLM get where the configuration does not say.

Knows the configuration and the cores of this machine. Starts nothing.
"""

from __future__ import annotations

import os

from skyrl.base.config.server import ServerConfig
from skyrl.inference.vllm_command import cuda_devices

MOST_THREADS = 16
"""More threads make steps of small models slower: each product waits for the last thread."""


def with_threads(config: ServerConfig) -> ServerConfig:
    """The configuration with as many `threads` as this process has cores, if it does not name a number itself.

    A tenant who samples and trains in turns has either vLLM or the trainer idle, so both get all cores. Replicas and
    base models compute at the same time, so they divide the cores. With Ray each process asks the cluster for as many
    CPUs as `threads`, and on a GPU threads do nothing: there the default stays."""
    if "threads" in config.model_fields_set or config.ray is not None or cuda_devices():
        return config
    together = max(config.backend_config.inference.num_engines, len(config.base_models))
    threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // together))
    return config.model_copy(update={"threads": threads})
