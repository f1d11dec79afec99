"""Tenants take turns between long prompts and answers: a tenant's long prompts take at most every other second from the
answers of others.

vLLM adds waiting prompts to each step, as many as fit. A step takes as long as its prompts: while a tenant's prompts of
10,000 tokens come one after the other, each token of everybody else's answers waits for a whole prompt. The order of
waiting requests does not help: the answers run already. So here a tenant whose long prompts were in a step beside
requests of another tenant owes the time of this step. Until as much time has gone without prompts of the tenant, its
next ones wait, if answers of another tenant run.

Knows the scheduler of vLLM 0.32, and tenants by the tags in their requests' priorities.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS

LONG_TOKENS = 1_024
"""So many prompt tokens of a tenant in one step make its debt. Fewer take about as long as a step of answers alone."""
MOST_WAITING = 1_024
"""With more waiting requests none is held back: each step looks at all that are."""
MOST_OWED_S = 60.0
"""A tenant owes at most so much: long prompts that were not held back make debts, too."""


class Debts:
    """The seconds that each tenant owes. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owed: defaultdict[str, float] = defaultdict(float)
        self._steps: deque[tuple[float, frozenset[str]]] = deque()
        """The steps that run, each with its begin and the tenants with long prompts in it."""
        self._ended_at = 0.0
        self._seen_at = -1, -1
        self._seen: frozenset[str] = frozenset()

    def running(self, scheduler: Scheduler) -> frozenset[str]:
        """The tenants of the running requests. Each of a thousand waiting requests may ask, so it is found once for
        each step and each request that has begun in it."""
        if (at := (scheduler.current_step, len(scheduler.running))) != self._seen_at:
            self._seen_at, self._seen = at, frozenset(map(tenant_of, scheduler.running))
        return self._seen

    def owes(self, tenant: str) -> bool:
        return tenant in self._owed

    def begin(self, prompt_tokens: Mapping[str, int]) -> None:
        """A step begins that computes so many tokens of each tenant's prompts."""
        long = frozenset(tenant for tenant, tokens in prompt_tokens.items() if tokens >= LONG_TOKENS)
        self._steps.append((self._clock(), long))

    def end(self) -> None:
        """The oldest step has ended. It began when it was planned, or when the step before it ended."""
        if not self._steps:
            return
        began_at, long = self._steps.popleft()
        now = self._clock()
        seconds, passed, self._ended_at = now - max(began_at, self._ended_at), now - self._ended_at, now
        for tenant in [*self._owed]:
            if tenant not in long:
                self._owed[tenant] -= passed  # also of the time in which no step ran
                if self._owed[tenant] <= 0:
                    del self._owed[tenant]
        for tenant in long:
            self._owed[tenant] = min(self._owed[tenant] + seconds, MOST_OWED_S)


def tenant_of(request: Request) -> str:
    """The tag in the request's priority. Without a priority the model of its adapter, whose name is `MODEL@VERSION` or
    any other."""
    if request.priority > 0:
        return f"#{request.priority % TENANT_TAGS}"
    name = "" if request.lora_request is None else request.lora_request.lora_name
    return name.rpartition("@")[0] or name


def prompt_tokens(output: Any, requests: Mapping[str, Request]) -> dict[str, int]:
    """By tenant, the tokens of prompts in a step. An answer has one token in it, or those that were guessed."""
    tokens: defaultdict[str, int] = defaultdict(int)
    for request_id, count in output.num_scheduled_tokens.items():
        if count > 1 and request_id not in output.scheduled_spec_decode_tokens:
            tokens[tenant_of(requests[request_id])] += count
    return tokens


def is_computed(scheduler: Scheduler, request: Request) -> bool:
    """Whether the cache has the last full block of a prompt, as of a sample of which another one has begun. Such a
    prompt takes no longer than an answer."""
    manager = scheduler.kv_cache_manager
    last = (request.num_tokens - 1) // manager.block_pool.hash_block_size
    if not 0 < last <= len(request.block_hashes) or not manager.prefix_cache_lookup_enabled(request):
        return False
    groups = [*range(len(manager.coordinator.single_type_managers))]
    return manager.block_pool.get_cached_block(request.block_hashes[last - 1], groups) is not None


def take_turns() -> None:
    """Hold prompts of tenants with a debt back while answers of other tenants run."""
    schedule, update = Scheduler.schedule, Scheduler.update_from_output
    is_ready = Scheduler._handle_blocked_waiting_request

    def scheduled(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        debts = _debts(self)
        output = schedule(self, *args, **kwargs)
        tokens = prompt_tokens(output, self.requests)
        debts.begin({tenant: count for tenant, count in tokens.items() if debts.running(self) - {tenant}})
        return output

    def updated(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        _debts(self).end()
        return update(self, *args, **kwargs)

    def is_ready_now(self: Scheduler, request: Request) -> bool:
        if not is_ready(self, request):
            return False
        debts, tenant = _debts(self), tenant_of(request)
        must_wait = debts.owes(tenant) and bool(debts.running(self) - {tenant}) and not is_computed(self, request)
        request.skyrl_held = held = must_wait and len(self.waiting) <= MOST_WAITING  # type: ignore[attr-defined]
        return not held

    Scheduler.schedule = scheduled  # type: ignore[method-assign]
    Scheduler.update_from_output = updated  # type: ignore[method-assign]
    Scheduler._handle_blocked_waiting_request = is_ready_now  # type: ignore[method-assign]


def _debts(scheduler: Any) -> Debts:
    try:
        return scheduler.skyrl_debts
    except AttributeError:
        scheduler.skyrl_debts = Debts()
        return scheduler.skyrl_debts
