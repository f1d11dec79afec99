"""vLLM general plugin: loaded by vLLM itself, in its API server, engine core and workers.

Does five things: no process of vLLM outlives its parent; every endpoint asks for the API key; any temperature is
taken; on a CPU, LoRA is right (see `punica_cpu`) and prompts are scored with more than vLLM's own logprobs (see
`xargs`); and a CPU engine core is forked from the API server instead of importing everything again.
Knows vLLM's internals, of exactly the versions it was tested with: it patches no other, and says so. Knows nothing
of the rest of skyrl.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys

from skyrl.vllm_plugin.versions import TESTED_VERSIONS

logger = logging.getLogger("vllm.skyrl_plugin")

FORK_ENGINE_VARIABLE = "SKYRL_VLLM_FORK_ENGINE"
"""Environment variable; "1" asks for a forked engine core (CPU and a single-process executor only)."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Entry point (`vllm.general_plugins`); vLLM calls it once per process, spawned children included."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _die_with(parent.pid)
    _cover_forks()

    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.error(
            "skyrl's plugin is for vLLM %s*, this is %s: nothing is patched. On a CPU, base-model requests beside "
            "LoRA requests may get another adapter's weights, and prompt logprobs may stop the engine; anywhere, "
            "development endpoints (/pause, /collective_rpc) are open to every user of this machine.",
            TESTED_VERSIONS[0],
            vllm.__version__,
        )
        return
    from skyrl.vllm_plugin.temperature import allow_any_temperature

    allow_any_temperature()
    if parent is None:
        _guard_all_endpoints()
    if current_platform.is_cpu():
        from skyrl.vllm_plugin.cpu_patches import apply

        apply(fork_engine=os.environ.get(FORK_ENGINE_VARIABLE) == "1")


def _die_with(parent_pid: int) -> None:
    """SIGKILL for this process once its parent is gone; at once if that has happened already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _cover_forks() -> None:
    """The same for processes forked from this one and from its children: a fork does not inherit it."""
    forking = [0]

    def before() -> None:
        forking[0] = os.getpid()

    os.register_at_fork(before=before, after_in_child=lambda: _die_with(forking[0]))


def _guard_all_endpoints() -> None:
    """Ask for the key on every path: vLLM itself leaves /pause, /sleep and /collective_rpc open."""
    from vllm.entrypoints.serve.middleware import authenticate

    authenticate.GUARDED_PREFIX = "/"
