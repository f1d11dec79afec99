"""Lets vLLM forget its prefix cache when the version of the weights changes, also while requests are frozen.

vLLM's own reset refuses while a request holds a block of the cache. A frozen request may keep its blocks, but no other
request may find them: they were computed with the old weights.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, PackedBlockHashes
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
    if scheduler.aux_output_connector is not None:
        name_rows_anew(scheduler.aux_output_connector)
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(AllBlocksCleared())
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = secrets.token_hex(16)
            request.block_hashes = []
            request.update_block_hashes()


def name_rows_anew(connector: Any) -> None:
    """Let rows of routed experts that are stored from now on have other names than before.

    vLLM stores them by the block's hash, and keeps what it has under a name. So a block that is computed again with new
    weights would get the experts of the old ones. Its own reset drops what running requests have not stored yet, and
    frozen requests need that.

    The names that a running request has sent before stay. Two requests with the same long prompt may share such names:
    if both are in the middle of that prompt when the weights change, the rows that they share are stored once. So one
    of them may get rows that the other one computed."""
    salt = secrets.token_bytes(8)

    def packed(hashes: Sequence[bytes], sent: int) -> PackedBlockHashes | None:
        found = AuxOutputSchedulerConnector._pack_new_hashes(hashes, sent)
        if found is None:
            return None
        salted = [block_hash + salt for block_hash in found]
        return PackedBlockHashes(b"".join(salted), len(salted[0]))

    connector._pack_new_hashes = packed
