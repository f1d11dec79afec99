"""Tenants take turns between long prompts and answers: a tenant's long prompts take at most every other second from the
answers of others.

vLLM adds waiting prompts to each step, as many as fit. A step takes as long as its prompts: while a tenant's prompts of
10,000 tokens come one after the other, each token of everybody else's answers waits for a whole prompt. The order of
waiting requests does not help: the answers run already. So here a tenant whose long prompts were in a step owes the
time of this step. Until steps without prompts of the tenant have taken as long, its next ones wait, if answers of
another tenant run.

Knows the scheduler of vLLM 0.32, and tenants by the tags in their requests' priorities.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS

LONG_TOKENS = 1_024
"""So many prompt tokens of a tenant in one step make its debt. Fewer take about as long as a step of answers alone."""
MOST_WAITING = 1_024
"""With more waiting requests none is held back: each step looks at all that are."""


class Debts:
    """The seconds that each tenant owes. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owed: defaultdict[str, float] = defaultdict(float)
        self._steps: deque[tuple[float, frozenset[str]]] = deque()
        """The steps that run, each with its begin and the tenants with long prompts in it."""
        self._ended_at = 0.0

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
        seconds, self._ended_at = now - max(began_at, self._ended_at), now
        for tenant in [*self._owed]:
            if tenant not in long:
                self._owed[tenant] -= seconds
                if self._owed[tenant] <= 0:
                    del self._owed[tenant]
        for tenant in long:
            self._owed[tenant] += seconds


def tenant_of(request: Request) -> str:
    """The tag in the request's priority. Without a priority the model of its adapter, whose name is `MODEL@VERSION` or
    any other."""
    if request.priority > 0:
        return f"#{request.priority % TENANT_TAGS}"
    name = "" if request.lora_request is None else request.lora_request.lora_name
    return name.rpartition("@")[0] or name


def must_wait(debts: Debts, request: Request, running: Iterable[Request]) -> bool:
    tenant = tenant_of(request)
    return debts.owes(tenant) and any(tenant_of(other) != tenant for other in running)


def take_turns() -> None:
    """Hold prompts of tenants with a debt back while answers of other tenants run."""
    schedule, update = Scheduler.schedule, Scheduler.update_from_output
    is_ready = Scheduler._handle_blocked_waiting_request

    def scheduled(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        debts = _debts(self)
        output = schedule(self, *args, **kwargs)
        tokens: defaultdict[str, int] = defaultdict(int)
        for request_id, count in output.num_scheduled_tokens.items():
            if count > 1:
                tokens[tenant_of(self.requests[request_id])] += count
        debts.begin(tokens)
        return output

    def updated(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        _debts(self).end()
        return update(self, *args, **kwargs)

    def is_ready_now(self: Scheduler, request: Request) -> bool:
        if not is_ready(self, request):
            return False
        return len(self.waiting) > MOST_WAITING or not must_wait(_debts(self), request, self.running)

    Scheduler.schedule = scheduled  # type: ignore[method-assign]
    Scheduler.update_from_output = updated  # type: ignore[method-assign]
    Scheduler._handle_blocked_waiting_request = is_ready_now  # type: ignore[method-assign]


def _debts(scheduler: Any) -> Debts:
    try:
        return scheduler.skyrl_debts
    except AttributeError:
        scheduler.skyrl_debts = Debts()
        return scheduler.skyrl_debts
