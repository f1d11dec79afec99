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


def register() -> None:
    """Entry point (`vllm.general_plugins`). vLLM calls it once per process, also in spawned children."""
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
    from skyrl.inference.vllm_plugin import model_runners
    from skyrl.inference.vllm_plugin.patches import (
        add_parsers,
        allow_any_temperature,
        check_loaded_adapters,
        read_fused_experts,
        serve_lm_head,
    )
    from skyrl.inference.vllm_plugin.prefix_cache import forget_with_weights, share_tails

    add_parsers()
    allow_any_temperature()
    forget_with_weights()
    share_tails()
    serve_lm_head()
    read_fused_experts()
    check_loaded_adapters()
    model_runners.score_prompts_of_first_runner()
    model_runners.score_prompts_of_second_runner()
    model_runners.keep_own_logprobs_of_first_runner()
    model_runners.keep_own_logprobs_of_second_runner()
    if parent is None:
        from skyrl.inference.vllm_plugin.answers import allow_tokens_only, tell_cached_prompts, tell_versions
        from skyrl.inference.vllm_plugin.logprobs import tell_marks
        from skyrl.inference.vllm_plugin.server_patches import (
            exit_with_engine,
            hold_from_the_start,
            read_prompts,
            refuse_ids_beyond_rows,
            repeat_requests,
        )

        exit_with_engine()
        hold_from_the_start()
        read_prompts()
        allow_tokens_only()
        tell_cached_prompts()
        repeat_requests()
        tell_marks()
        refuse_ids_beyond_rows()
        tell_versions(early=os.environ.get(TELL_VERSIONS_VARIABLE) == "1")
        _guard_all_endpoints()
    if current_platform.is_cpu():
        from skyrl.inference.vllm_plugin.cpu_patches import patch_cpu

        patch_cpu(fork_engine=os.environ.get(FORK_ENGINE_VARIABLE) == "1")
    elif current_platform.is_cuda_alike():
        from skyrl.inference.vllm_plugin.cuda_patches import correct_prompt_logits

        correct_prompt_logits()


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


def _guard_all_endpoints() -> None:
    """Require the API key on every path. vLLM leaves /pause, /sleep and /collective_rpc open."""
    from vllm.entrypoints.serve.middleware import authenticate

    authenticate.GUARDED_PREFIX = "/"
