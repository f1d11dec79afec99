"""vLLM general plugin: vLLM loads it in its API server, engine core and workers.

What it changes: no process of vLLM outlives its parent; every endpoint needs the API key; any temperature is allowed;
new weights empty the prefix cache (see `prefix_cache`), and samples of one prompt share the part of it behind its last
full block (see `shared_tails`); answers tell which weights sampled which tokens (see `token_versions`), and what each
sequence found in the prefix cache (see `cached_prompts`); clients may do without the text of completions (see
`tokens_only`); ids of tokens beyond the model's rows are refused (see `rows_of_tokens`); grammars of what is no chat
hold from the first token (see `grammars`), and logprobs under a grammar are the model's own (see `own_logprobs`);
thoughts that a model may write are read (see `written_thoughts`), those of earlier answers do not count as the answer's
(see `prompt_thoughts`), and ids in Mistral's calls are no part of their names (see `mistral_calls`); requests whose
pictures the engine has lost are repeated (see `lost_pictures`); adapters on lm_head work in more architectures (see
`unembedding`); adapters on fused experts are read in one more architecture (see `fused_experts`); adapters of which
vLLM would ignore a part are refused (see `checked_adapters`); prompt logprobs are computed by parts and have the right
adapter's part of lm_head (see `prompt_rows`), and there are more of them than vLLM's own (see `extra_args`); the API
server ends when its engine has died (see `dead_engine`); on a CPU, LoRA computes correct results (see `punica_cpu`),
and so does latent attention (see `rotary_cpu`), routed experts can be returned (see `routed_experts_cpu`), mixtures of
experts can be served with adapters, on experts too (see `experts_cpu` and `routers_cpu`), slots of adapters and the
cache take memory when they are used (see `memory_cpu`), adapters that are unloaded leave the engine (see
`unloaded_adapters`), and neither the engine core nor the look at a model's class imports vLLM a second time (see
`cpu_patches`).

Knows the internals of the tested versions of vLLM. In another version it logs an error and patches nothing. Knows
nothing of the rest of skyrl.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys

from skyrl.inference.vllm_plugin.versions import TELL_VERSIONS_VARIABLE, TESTED_VERSIONS

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
    from skyrl.inference.vllm_plugin import first_runner, second_runner
    from skyrl.inference.vllm_plugin.checked_adapters import check_loaded_adapters
    from skyrl.inference.vllm_plugin.fused_experts import read_fused_experts
    from skyrl.inference.vllm_plugin.parsers import add_parsers
    from skyrl.inference.vllm_plugin.prefix_cache import forget_with_weights
    from skyrl.inference.vllm_plugin.shared_tails import share_tails
    from skyrl.inference.vllm_plugin.temperature import allow_any_temperature
    from skyrl.inference.vllm_plugin.unembedding import serve_lm_head

    add_parsers()
    allow_any_temperature()
    forget_with_weights()
    share_tails()
    serve_lm_head()
    read_fused_experts()
    check_loaded_adapters()
    first_runner.score_prompts()
    second_runner.score_prompts()
    first_runner.keep_own_logprobs()
    second_runner.keep_own_logprobs()
    if parent is None:
        from skyrl.inference.vllm_plugin.cached_prompts import tell_cached_prompts
        from skyrl.inference.vllm_plugin.dead_engine import exit_with_engine
        from skyrl.inference.vllm_plugin.grammars import hold_from_the_start
        from skyrl.inference.vllm_plugin.lost_pictures import repeat_requests
        from skyrl.inference.vllm_plugin.own_logprobs import tell_marks
        from skyrl.inference.vllm_plugin.prompt_thoughts import read_prompts
        from skyrl.inference.vllm_plugin.rows_of_tokens import refuse_ids_beyond_rows
        from skyrl.inference.vllm_plugin.token_versions import tell_versions
        from skyrl.inference.vllm_plugin.tokens_only import allow_tokens_only

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
        from skyrl.inference.vllm_plugin.cpu_patches import apply

        apply(fork_engine=os.environ.get(FORK_ENGINE_VARIABLE) == "1")
    elif current_platform.is_cuda_alike():
        from skyrl.inference.vllm_plugin.punica_cuda import correct_prompt_logits

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
