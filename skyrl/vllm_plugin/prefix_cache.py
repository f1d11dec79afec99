"""Lets vLLM forget its prefix cache when the version of the weights changes, also while requests are frozen.

vLLM's own reset refuses while a request holds a block of the cache. A frozen request may keep its blocks, but no other
request may find them: they were computed with the old weights.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine.core import EngineCore

logger = logging.getLogger("vllm.skyrl_plugin")


def forget_with_weights() -> None:
    """Patch this process: a new version of the weights empties the prefix cache. A second call changes nothing."""
    original = EngineCore.set_weight_version
    if getattr(original, "forgets", False):
        return

    def patched(self: EngineCore, weight_version: str) -> None:
        forget(self.scheduler)
        original(self, weight_version)

    patched.forgets = True  # type: ignore[attr-defined]
    EngineCore.set_weight_version = patched


def forget(scheduler: Any) -> None:
    """Make all blocks of the cache unfindable. Requests that have computed something go on with their blocks; what they
    compute from now on has both weights in it, so it is stored under names that no other request has."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(AllBlocksCleared())
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = secrets.token_hex(16)
            request.block_hashes = []
            request.update_block_hashes()
