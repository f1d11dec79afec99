"""vLLM general plugin: vLLM loads it in its API server, engine core and workers.

`register` patches the process that loads it. Each file of patches begins with its index: `patches` for every process,
`server_patches` for the API server, `cpu_patches` and `cuda_patches` for the platform. A patch is a function whose
docstring says what changes. Besides, no process of vLLM outlives its parent, and every endpoint needs the API key.

Knows the internals of the tested versions of vLLM. In another version it logs an error and patches nothing. Knows
nothing of the rest of skyrl. Importing this package alone loads neither vLLM nor torch.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys

from skyrl.inference.vllm_plugin.protocol import TELL_VERSIONS_VARIABLE, TESTED_VERSIONS

logger = logging.getLogger("vllm.skyrl_plugin")

FORK_ENGINE_VARIABLE = "SKYRL_VLLM_FORK_ENGINE"
"""Environment variable; "1" forks the engine core (only on a CPU with a single-process executor)."""

_PR_SET_PDEATHSIG = 1
_is_registered = False


def register() -> None:
    """Entry point (`vllm.general_plugins`). vLLM calls it once per process, also in spawned children. A second call
    changes nothing: what it patched before, a forked child has, too."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _die_with(parent.pid)
    _cover_forks()

    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.error(
            "skyrl's plugin is for vLLM %s*, this is %s: nothing is patched. On a CPU, base-model requests in a batch "
            "with LoRA requests may get an adapter's weights. On all devices, prompt logprobs may be computed with "
            "another adapter, or stop the engine, and development endpoints (/pause, /collective_rpc) are open to "
            "every user of this machine.",
            TESTED_VERSIONS[0],
            vllm.__version__,
        )
        return
    from skyrl.inference.vllm_plugin.patches import patch_process

    patch_process()
    if parent is None:
        from skyrl.inference.vllm_plugin.server_patches import patch_server

        patch_server(early_versions=os.environ.get(TELL_VERSIONS_VARIABLE) == "1")
    if current_platform.is_cpu():
        from skyrl.inference.vllm_plugin.cpu_patches import patch_cpu

        patch_cpu(fork_engine=os.environ.get(FORK_ENGINE_VARIABLE) == "1")
    elif current_platform.is_cuda_alike():
        from skyrl.inference.vllm_plugin.cuda_patches import patch_cuda

        patch_cuda()


def _die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends. Exit at once if the parent has ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _cover_forks() -> None:
    """Call `_die_with` in all forked descendants, because a fork does not inherit the setting."""
    forking = [0]

    def before() -> None:
        forking[0] = os.getpid()

    os.register_at_fork(before=before, after_in_child=lambda: _die_with(forking[0]))
