"""Loading an adapter that a save has just written on the inference servers."""

from __future__ import annotations

import logging

import httpx

from skyrl.engine.threads import EngineThreads
from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_client import VllmError
from skyrl.types.weights import AdapterVersion
from skyrl.weights.adapters import AdapterFiles
from skyrl.weights.protocol import publish

logger = logging.getLogger(__name__)


class AdapterPublisher:
    """Without a group (skyrl does not run the inference server), adapters are loaded when samples need them."""

    def __init__(self, group: EngineGroup | None, threads: EngineThreads) -> None:
        self._group = group
        self._threads = threads

    def publish(self, adapter: AdapterVersion) -> None:
        """Load the adapter on all inference servers. Called on a file thread, before the save is settled.

        The save succeeds even if a server is away: a sample that needs the adapter loads it later.
        """
        if self._group is None:
            return
        try:
            self._threads.wait_for_loop(publish(AdapterFiles(self._group.publish_adapter), adapter, [adapter]))
        except (httpx.TransportError, VllmError, AdapterMissing) as error:
            logger.warning("adapter %s was saved but not loaded yet: %s", adapter.name, error)
        except AdapterUnavailable as error:
            logger.warning("adapter %s was saved but not loaded yet: %s (%s)", adapter.name, error, error.reason)
