"""A tenant's account when its quota is taken away and given back while samples are under way."""

from __future__ import annotations

import asyncio

from skyrl.quotas.account import Account, Ticket
from skyrl.quotas.limits import QuotaLimits

RATE = 600
WAIT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, waiting: dict[str, Ticket]) -> Account:
    return Account(QuotaLimits(tokens_per_minute=RATE), lambda _: True, clock, waiting)


def renew(account: Account) -> None:
    account.apply(QuotaLimits())
    account.apply(QuotaLimits(tokens_per_minute=RATE))


async def test_what_was_taken_under_an_ended_quota_is_not_given_to_the_next_one() -> None:
    waiting: dict[str, Ticket] = {}
    of_tenant = account(Clock(), waiting)
    before = of_tenant.admit("before", 10 * RATE)
    renew(of_tenant)
    of_tenant.admit("full", RATE)
    turn = asyncio.create_task(of_tenant.admit("waits", RATE).wait_turn())
    await asyncio.sleep(0)
    before.end()
    assert set(waiting) == {"waits"}
    await asyncio.sleep(0)
    assert not turn.done()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


async def test_turn_under_an_ended_quota_is_over_also_when_there_is_a_new_one() -> None:
    clock = Clock()
    of_tenant = account(clock, {})
    clock.now = 7 * 86_400.0
    of_tenant.admit("full", RATE)
    late = of_tenant.admit("late", RATE)
    renew(of_tenant)
    await asyncio.wait_for(late.wait_turn(), WAIT_S)
