"""A tenant's account whose token quota is removed and set again while samples are in flight."""

from __future__ import annotations

import asyncio

from skyrl.sampling.quota_account import Account, QuotaLimits, Ticket

RATE = 600
WAIT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, waiting: dict[str, Ticket]) -> Account:
    return Account(QuotaLimits(tokens_per_minute=RATE), lambda _: True, clock, waiting)


def remove_and_set_quota(account: Account) -> None:
    account.apply(QuotaLimits())
    account.apply(QuotaLimits(tokens_per_minute=RATE))


async def test_a_sample_admitted_under_the_old_quota_gives_no_tokens_to_the_new_one() -> None:
    waiting: dict[str, Ticket] = {}
    tenant_account = account(Clock(), waiting)
    before = tenant_account.admit("before", 10 * RATE)
    remove_and_set_quota(tenant_account)
    tenant_account.admit("full", RATE)
    turn = asyncio.create_task(tenant_account.admit("waits", RATE).wait_turn())
    await asyncio.sleep(0)
    before.end()
    assert set(waiting) == {"waits"}
    await asyncio.sleep(0)
    assert not turn.done()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


async def test_a_sample_that_waits_under_the_old_quota_starts_at_once_when_a_new_quota_is_set() -> None:
    clock = Clock()
    tenant_account = account(clock, {})
    clock.now = 7 * 86_400.0
    tenant_account.admit("full", RATE)
    late = tenant_account.admit("late", RATE)
    remove_and_set_quota(tenant_account)
    await asyncio.wait_for(late.wait_turn(), WAIT_S)
