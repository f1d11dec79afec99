"""Whether the installed vLLM can be used: there is one, it finds skyrl's plugin, and its version was tested with skyrl.

Reads the metadata of installed packages only.
"""

from __future__ import annotations

import logging

from skyrl.base.config.server import ConfigError
from skyrl.inference.features import vllm_version
from skyrl.inference.vllm_command import plugin_installed
from skyrl.inference.vllm_plugin.versions import TESTED_VERSIONS

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
