"""Admission to vLLM's cache: a request begins once the cache is expected to have room for it and all running requests
until they end.

vLLM lets a request begin when its prompt fits. Samples of short prompts and long answers then fill the cache together,
and vLLM throws some of them out again and again (preemption), each time to compute all of their tokens anew. Here the
room that the running requests will still need is kept free. How long answers get is learned from those that have ended;
what the next steps take is known.

Knows the scheduler and the manager of the cache of vLLM 0.32. Does not know tenants: their order is the priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

FIRST_LENGTH = 256.0
"""The expected tokens of an answer before one with the same `max_tokens` has ended."""
WEIGHT = 1 / 16
"""The weight of the newest answer in the average."""
MAX_BOUNDS = 1_000
"""Values of `max_tokens` whose averages are kept."""
PART = 0.25
"""Of the expected growth, the part that is kept free. With more, fewer requests are preempted, but places stay idle:
answers end before they all have grown (`benchmarks/scheduling.py`)."""
SOON = 4
"""The blocks that running requests take in so many steps are kept free in any case. With more, places stay idle; with
fewer, a request that has just begun is thrown out before it has sampled as much as it costs to compute again."""
BEYOND = 0.25
"""An answer is expected to get longer by at least this part of what it has."""
_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_BEGINS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Lengths:
    """Average lengths of answers in tokens, by the `max_tokens` of their requests, which samples of a run share."""

    def __init__(self) -> None:
        self._averages: dict[int, float] = {}

    def ended(self, bound: int, length: int) -> None:
        average = self._averages.get(bound)
        if average is None:
            if len(self._averages) >= MAX_BOUNDS:
                self._averages.clear()
            average = float(length)
        self._averages[bound] = average + WEIGHT * (length - average)

    def left(self, bound: int, sampled: int) -> float:
        """How many tokens an answer is expected to get that has `sampled`."""
        expected = self._averages.get(bound, FIRST_LENGTH) - sampled
        return min(max(expected, BEYOND * sampled), bound - sampled)


def growth(running: Sequence[tuple[float, int]]) -> float:
    """The most tokens that these requests will hold together beyond what they hold now.

    Each request is given as the tokens that it still gets, one in each step, and those that it gives back at its end;
    the one that ends first comes first.
    """
    most, given_back, number = 0.0, 0, len(running)
    for left, held in running:
        most = max(most, number * left - given_back)
        given_back += held
        number -= 1
    return most


class Headroom:
    """The free blocks that the requests of one scheduler will need. Only attention over the whole sequence takes more
    blocks for longer sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._growing = [each for each in managers if isinstance(each, FullAttentionManager)]
        self._scheduler = scheduler
        self._own = scheduler.kv_cache_manager.watermark_blocks
        self._blocks_per_token = sum(1 / each.block_size for each in self._growing)
        self.lengths = Lengths()
        self._step = self._known = -1
        """The step of the scheduler whose running requests are known, and their number."""
        self._told: list[tuple[float, int]] = []
        self.refused_in = -1
        """The step in which a request was last refused for lack of room."""

    def blocks(self, request: Request) -> int:
        """How many blocks must stay free when this request begins; at least as many as the operator wants."""
        if not self._growing:
            return self._own
        running, step = self._scheduler.running, self._scheduler.current_step
        if step != self._step:
            self._step, self._told = step, sorted(map(self._tell, running))
        else:  # requests that begin in this step come last
            for each in running[self._known :]:
                insort(self._told, self._tell(each))
        self._known = len(running)
        insort(with_it := self._told.copy(), self._tell(request))
        soon = sum(map(self._takes_soon, running)) + self._takes_soon(request)
        return max(self._own, soon, int(PART * growth(with_it) * self._blocks_per_token))

    def refused(self) -> None:
        self.refused_in = self._scheduler.current_step

    def _tell(self, request: Request) -> tuple[float, int]:
        sampled = request.num_output_tokens
        held = sampled if self._shares_prompt(request) else request.num_tokens
        return self.lengths.left(request.max_tokens, sampled), held

    def _takes_soon(self, request: Request) -> int:
        """The blocks that it takes in SOON steps beyond those that its tokens fill now."""
        tokens = request.num_tokens
        then = tokens + min(SOON, request.max_tokens - request.num_output_tokens)
        return sum(-(-then // each.block_size) - -(-tokens // each.block_size) for each in self._growing)

    def _shares_prompt(self, request: Request) -> bool:
        """Whether other running requests hold all full blocks of its prompt."""
        manager = self._growing[0]
        blocks, last = (
            manager.req_to_blocks.get(request.request_id, ()),
            request.num_prompt_tokens // manager.block_size,
        )
        return 0 < last <= len(blocks) and blocks[last - 1].ref_cnt > 1


def keep_headroom() -> None:
    """Let each request that begins leave the blocks free that the running ones will need. Without a running request it
    begins at once, as in vLLM."""
    init, allocate, free = Scheduler.__init__, KVCacheManager.allocate_slots, Scheduler._free_request

    def made(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        manager: Any = self.kv_cache_manager
        manager.skyrl_headroom = Headroom(self)

    def allocated(self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        headroom: Headroom | None = getattr(self, "skyrl_headroom", None)
        if headroom is not None and request.status in _BEGINS:
            self.watermark_blocks = headroom.blocks(request)
        blocks = allocate(self, request, *args, **kwargs)
        if headroom is not None and blocks is None:
            headroom.refused()
        return blocks

    def freed(self: Scheduler, request: Request, *args: Any, **kwargs: Any) -> Any:
        headroom: Headroom | None = getattr(self.kv_cache_manager, "skyrl_headroom", None)
        if headroom is not None and request.status in _ENDED:
            headroom.lengths.ended(request.max_tokens, request.num_output_tokens)
        return free(self, request, *args, **kwargs)

    Scheduler.__init__ = made  # type: ignore[method-assign]
    KVCacheManager.allocate_slots = allocated  # type: ignore[method-assign]
    Scheduler._free_request = freed  # type: ignore[method-assign]
