"""Why requests wait in vLLM: the number for each reason, and what the reason is the bound of.

vLLM's own metric tells two reasons, capacity and everything else. Here the engine adds the reasons to the scheduler's
statistics that it sends to its API server, and the API server shows them as two gauges. Those that a step has not
looked at wait for what the step ran out of.

Knows the scheduler and the statistics of vLLM 0.32. `admission` and `prefills` say what they hold back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import Gauge
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.request import Request, RequestStatus

CACHE, SEATS, TOKENS, ADAPTERS, TURN, OTHER = "cache", "seats", "tokens", "adapters", "turn", "other"
"""Room in the key-value cache; running requests (max_num_seqs); tokens of a step (max_num_batched_tokens); adapters in
a step (max_loras); the turn of other tenants (`prefills`); a grammar that is compiled, or new weights."""
REASONS = (CACHE, SEATS, TOKENS, ADAPTERS, TURN, OTHER)
_WAITS, _BOUND = "skyrl_waits_", "skyrl_bound_"
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def count_waits() -> None:
    """In the engine: add the counts to each step's statistics, in a field that is empty unless caches are fetched."""
    make_stats = Scheduler.make_stats

    def counted(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        stats = make_stats(self, *args, **kwargs)
        if stats is not None:
            waits, bounds = waits_of(self), bounds_of(self)
            field = stats.num_kv_fetch_reqs_by_stage
            field |= {_WAITS + reason: waits[reason] for reason in REASONS}
            field |= {_BOUND + reason: bound for reason, bound in bounds.items()}
        return stats

    Scheduler.make_stats = counted  # type: ignore[method-assign]


def waits_of(scheduler: Any) -> Counter[str]:
    """The number of waiting requests for each reason."""
    held = scheduler.deferred_waiting
    adapters = {each.lora_request.lora_int_id for each in scheduler.running if held and each.lora_request is not None}
    full = scheduler.lora_config is not None and len(adapters) >= scheduler.lora_config.max_loras
    out_of = _step_ran_out_of(scheduler)
    waits = Counter(_deferred_by(request, adapters if full else None) or out_of for request in held)
    _, waiting = scheduler.get_request_counts()
    if (left := waiting - waits.total()) > 0:
        waits[out_of] += left
    return waits


def bounds_of(scheduler: Any) -> dict[str, int]:
    """The bound of each reason that is one: tokens of the cache, requests, tokens, adapters."""
    cache, lora = scheduler.cache_config, scheduler.lora_config
    bounds = {
        CACHE: (cache.num_gpu_blocks or 0) * scheduler.block_size,
        SEATS: scheduler.max_num_active_reqs,
        TOKENS: scheduler.max_num_scheduled_tokens,
    }
    return bounds if lora is None else bounds | {ADAPTERS: lora.max_loras}


def _deferred_by(request: Request, adapters: set[int] | None) -> str | None:
    """What a request waits for that vLLM has put aside, at this step or an earlier one; None: for what the step ran out
    of. `adapters`: those that run, if there is no room for another one."""
    if request.status not in _READY:
        return OTHER
    if getattr(request, "skyrl_held", False):
        return TURN
    lora = request.lora_request
    return ADAPTERS if adapters is not None and lora is not None and lora.lora_int_id not in adapters else None


def _step_ran_out_of(scheduler: Any) -> str:
    if scheduler._pause_state != PauseState.UNPAUSED:
        return OTHER
    headroom = getattr(scheduler.kv_cache_manager, "skyrl_headroom", None)
    if headroom is not None and headroom.refused_in == scheduler.current_step:
        return CACHE
    active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    return SEATS if active >= scheduler.max_num_active_reqs else TOKENS


def show_waits() -> None:
    """In the API server: take the counts out of the statistics, before vLLM's logs read them, and show them."""
    record = StatLoggerManager.record
    gauges: list[tuple[str, Gauge]] = []

    def recorded(self: Any, scheduler_stats: Any, *args: Any, engine_idx: int | None = None, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            if not gauges:  # vLLM removes those of its name that were there before it starts
                gauges.extend(_gauges())
            field = scheduler_stats.num_kv_fetch_reqs_by_stage
            for prefix, gauge in gauges:
                for name in [name for name in field if name.startswith(prefix)]:
                    gauge.labels(str(engine_idx or 0), name.removeprefix(prefix)).set(field.pop(name))
        record(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    StatLoggerManager.record = recorded  # type: ignore[method-assign]


def _gauges() -> list[tuple[str, Gauge]]:
    about = "Requests that wait, by what for."
    waits = Gauge("vllm:skyrl_requests_waiting", about, ["engine", "reason"], multiprocess_mode="mostrecent")
    about = "How much there is of what requests wait for."
    bound = Gauge("vllm:skyrl_waiting_bound", about, ["engine", "reason"], multiprocess_mode="mostrecent")
    return [(_WAITS, waits), (_BOUND, bound)]
