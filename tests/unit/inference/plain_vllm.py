"""vLLM without the plugin, whose patches tests apply one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm import plugins
    from vllm.engine import arg_utils


@contextmanager
def without_plugin() -> Iterator[None]:
    """Within the block the arguments of an engine may be made. They load all plugins, for the whole process: then a
    later test would apply a patch twice."""
    with pytest.MonkeyPatch.context() as patches:
        for module in (plugins, arg_utils):
            patches.setattr(module, "load_general_plugins", lambda: None)
        yield
