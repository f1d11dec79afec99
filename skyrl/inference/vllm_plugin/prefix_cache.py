"""The prefix cache: new weights empty it, and requests with the same prompt share the tokens behind the prompt's last
full block.

Knows the scheduler and the manager of the cache of vLLM 0.32. Knows nothing of devices: both model runners copy blocks.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, PackedBlockHashes
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

logger = logging.getLogger("vllm.skyrl_plugin")


def forget_with_weights() -> None:
    """Let a new version of the weights empty the prefix cache, also while requests are frozen.

    vLLM's own reset refuses while a request holds a block of the cache. A frozen request may keep its blocks, but no
    other request may find them: they were computed with the old weights.
    """
    original = EngineCore.set_weight_version

    def patched(self: EngineCore, weight_version: str) -> None:
        forget(self.scheduler)
        original(self, weight_version)

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


FEWEST_TOKENS = 4
"""Shorter tails are computed by each request. A copy costs the others a step of the engine."""


@dataclass(slots=True)
class Tail:
    """The tail of one request: the prompt's tokens [start, end), and their hash. `salt`: the request's when the hash
    was made; the request gets another one when the weights change. `is_copied`: another request has computed the tail.
    `is_stored`: this one has. `is_full`: its block was full when it was stored."""

    start: int
    end: int
    digest: BlockHash
    salt: str | None
    has_waited: bool = False
    is_copied: bool = False
    is_stored: bool = False
    is_full: bool = False


class SharedTails:
    """The tails in the cache of one scheduler. `computing`: the hashes of those that are computed in this step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._managers = self._manager.coordinator.single_type_managers
        self._groups = list(range(len(self._managers)))
        self._block = scheduler.block_size
        self._hash = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
        self.computing: set[BlockHash] = set()

    def must_wait(self, request: Request) -> bool:
        """Whether another request computes this tail in this step. A request waits once."""
        if request.num_computed_tokens or not self._manager.prefix_cache_lookup_enabled(request):
            return False
        tail = self._tail_of(request)
        if tail is None or tail.has_waited or tail.digest not in self.computing:
            return False
        tail.has_waited = True
        return True

    def lengthened(self, request: Request, found: tuple[KVCacheBlocks, int, int]) -> tuple[KVCacheBlocks, int, int]:
        """What the cache holds of a prompt: `found`, and the tail if the cache has all blocks before it."""
        blocks, tokens, boundary = found
        if not self._manager.prefix_cache_lookup_enabled(request):
            return found
        tail = self._tail_of(request)
        if tail is None or tokens != tail.start or tail.digest in self.computing:
            return found
        last = self._pool.get_cached_block(tail.digest, self._groups)
        if last is None:
            return found
        tail.is_copied = True
        longer = tuple([*before, block] for before, block in zip(blocks.blocks, last, strict=True))
        return self._manager.create_kv_cache_blocks(longer), tail.end, boundary

    def store(self, request: Request, computed: int) -> None:
        """Make a tail findable in the step in which its tokens are computed: `computed` of the request's tokens after
        this step. When its block is full, the block gets another hash in place of this one: so it is stored again."""
        tail = self._tail_of(request)
        if tail is None or tail.is_copied or computed < tail.end or request.cache_salt != tail.salt:
            return
        is_full = computed >= tail.start + self._block
        if tail.is_full or (tail.is_stored and not is_full):
            return
        if not tail.is_stored:
            self.computing.add(tail.digest)
        tail.is_stored, tail.is_full = True, is_full
        for group, block in self._blocks(request, tail):
            self._pool._insert_block_hash(make_block_hash_with_group_id(tail.digest, group), block, tail.end)

    def forget(self, request: Request) -> None:
        """For a request that is taken out of this step again: its tail is not computed after all."""
        tail = getattr(request, "skyrl_tail", None)
        request.skyrl_tail = None  # type: ignore[attr-defined]
        if tail is not None and tail.digest in self.computing:
            self.computing.discard(tail.digest)
            self._pool.evict_blocks({block.block_id for _, block in self._blocks(request, tail)})

    def _blocks(self, request: Request, tail: Tail) -> list[tuple[int, Any]]:
        number = tail.start // self._block
        rows = [manager.req_to_blocks[request.request_id] for manager in self._managers]
        if any(number >= len(row) or row[number].is_null for row in rows):
            return []
        return [(group, row[number]) for group, row in enumerate(rows)]

    def _tail_of(self, request: Request) -> Tail | None:
        try:
            return request.skyrl_tail  # type: ignore[attr-defined]
        except AttributeError:
            tail = request.skyrl_tail = self._made(request)  # type: ignore[attr-defined]
            return tail

    def _made(self, request: Request) -> Tail | None:
        end = request.num_prompt_tokens - 1
        number = end // self._block
        start = number * self._block
        if request.num_output_tokens or request.prompt_token_ids is None or end - start < FEWEST_TOKENS:
            return None
        if len(request.block_hashes) < number:
            return None
        first = get_mm_features_in_window(request.mm_features, start, end)[0] if request.mm_features else 0
        extra, _ = generate_block_hash_extra_keys(request, start, end, first)
        parent = request.block_hashes[number - 1] if number else None
        digest = hash_block_tokens(self._hash, parent, request.prompt_token_ids[start:end], extra)
        return Tail(start, end, digest, request.cache_salt)


def can_share(scheduler: Scheduler) -> bool:
    """Whether the cache has blocks of attention alone, all of one size, which nothing but this scheduler fills or
    reads. Rows of routed experts are stored by full blocks."""
    config = scheduler.vllm_config
    manager = scheduler.kv_cache_manager
    kinds = {type(each) for each in manager.coordinator.single_type_managers}
    sizes = {each.block_size for each in manager.coordinator.single_type_managers}
    return (
        manager.enable_caching
        and kinds <= {FullAttentionManager, SlidingWindowManager}
        and sizes == {scheduler.block_size}
        and manager.block_pool.hash_block_size == scheduler.block_size
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and scheduler.aux_output_connector is None
        and not scheduler.is_encoder_decoder
        and not scheduler.enable_kv_cache_events
        and not scheduler.prefix_replay_tokens
        and config.speculative_config is None
        and scheduler.dcp_world_size == scheduler.pcp_world_size == 1
        and config.model_config.runner_type == "generate"
    )


def share_tails() -> None:
    """Let requests with the same prompt share the tokens behind the prompt's last full block.

    vLLM finds only whole blocks. So each of the n samples of a prompt computes the rest behind the last full block
    itself: a prompt of 45 tokens in blocks of 32 is computed once, and 13 tokens of it n times. Here the first request
    computes the rest, and the others wait for one step of the engine, copy that block, and compute the last token
    alone, from which they sample. The copies are those that vLLM makes for models with states (`prefix_match_unit`).

    A tail is the prompt's tokens behind the last full block, without the last token. Its block is found under a hash of
    its own, in the same map as full blocks: so it is forgotten with them, and when the block is used again.
    """
    schedule, is_ready, preempt = (
        Scheduler.schedule,
        Scheduler._handle_blocked_waiting_request,
        Scheduler._preempt_request,
    )
    find, allocate = KVCacheManager.get_computed_blocks, KVCacheManager.allocate_slots

    def scheduled(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        manager: Any = self.kv_cache_manager
        if not hasattr(manager, "skyrl_tails"):
            manager.skyrl_tails = SharedTails(self) if can_share(self) else None
        if manager.skyrl_tails is not None:
            manager.skyrl_tails.computing.clear()
        return schedule(self, *args, **kwargs)

    def is_ready_now(self: Scheduler, request: Request) -> bool:
        tails = _tails(self.kv_cache_manager)
        return is_ready(self, request) and not (tails is not None and tails.must_wait(request))

    def preempted(self: Scheduler, request: Request, *args: Any, **kwargs: Any) -> None:
        if (tails := _tails(self.kv_cache_manager)) is not None:
            tails.forget(request)
        preempt(self, request, *args, **kwargs)

    def found(self: KVCacheManager, request: Request) -> tuple[KVCacheBlocks, int, int]:
        tails, blocks = _tails(self), find(self, request)
        return blocks if tails is None else tails.lengthened(request, blocks)

    def allocated(
        self: KVCacheManager, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        blocks = allocate(self, request, num_new_tokens, num_new_computed_tokens, **kwargs)
        tails = _tails(self)
        if tails is not None and blocks is not None:
            tails.store(request, request.num_computed_tokens + num_new_computed_tokens + num_new_tokens)
        return blocks

    Scheduler.schedule = scheduled  # type: ignore[method-assign]
    Scheduler._handle_blocked_waiting_request = is_ready_now  # type: ignore[method-assign]
    Scheduler._preempt_request = preempted  # type: ignore[method-assign]
    KVCacheManager.get_computed_blocks = found  # type: ignore[method-assign]
    KVCacheManager.allocate_slots = allocated  # type: ignore[method-assign]


def _tails(manager: Any) -> SharedTails | None:
    return getattr(manager, "skyrl_tails", None)
