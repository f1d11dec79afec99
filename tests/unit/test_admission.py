"""How many samples may wait: never more than the bound, and room in it for who has little."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.sampling.admission import SHARE, Admission
from skyrl.wire.errors import RequestError


def fill(admission: Admission, tenant: str, size: int = 1, most: int = 100_000) -> int:
    """How many of its samples are let in."""
    for number in range(most):
        try:
            admission.enter(tenant, size)
        except RequestError:
            return number
    return most


def test_one_tenant_alone_leaves_a_ninth() -> None:
    admission = Admission(9_000, 10**9)
    assert fill(admission, "a") == 8_000
    assert fill(admission, "b", most=500) == 500, "and there it is for another"


def test_the_same_in_bytes() -> None:
    admission = Admission(10**6, 9_000)
    assert fill(admission, "a", size=10) == 800
    assert fill(admission, "b", size=10, most=50) == 50


def test_tenants_that_all_want_more_come_to_have_about_the_same() -> None:
    admission, held = Admission(9_000, 10**9), dict.fromkeys("abcd", 0)
    held["a"] = fill(admission, "a")
    for _ in range(500):
        for name in held:
            held[name] += fill(admission, name, most=40)
        for name in held:  # as their samples end
            for _ in range(min(20, held[name])):
                admission.leave(name, 1)
                held[name] -= 1
    for name in held:
        held[name] += fill(admission, name)
    assert max(held.values()) <= 1.3 * min(held.values())


@pytest.mark.parametrize("bound", range(1, 9))
def test_a_small_bound_is_one_tenants_whole(bound: int) -> None:
    assert fill(Admission(bound, 10**9), "a") == bound


def test_who_is_refused_is_told_why() -> None:
    admission = Admission(90, 10**9)
    fill(admission, "a")
    with pytest.raises(RequestError, match="^80 samples .* of yours") as refused:
        admission.enter("a", 1)
    assert refused.value.status == 429
    assert refused.value.retry_after_s
    for number in range(10):
        admission.enter(f"t{number}", 1)
    with pytest.raises(RequestError, match="^90 samples .* are waiting"):
        admission.enter("new", 1)


def test_a_body_beyond_the_whole_bound_is_let_in_alone() -> None:
    admission = Admission(10, 100)
    admission.enter("a", 500)
    with pytest.raises(RequestError):
        admission.enter("b", 1)
    admission.leave("a", 500)
    admission.enter("b", 100)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 40)),  # who, how many, size
        st.integers(0, 10**6),  # which of those that are in leaves
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(max_requests=st.integers(1, 200), max_bytes=st.integers(40, 4_000), steps=STEPS)
def test_never_above_the_bound_and_never_above_a_share(max_requests, max_bytes, steps) -> None:
    """Whoever has nothing in it is let in as long as there is room at all; who is refused while there is, has a share
    that is at least SHARE times what is free."""
    admission = Admission(max_requests, max_bytes)
    inside: list[tuple[str, int]] = []
    for step in steps:
        if isinstance(step, int):
            if inside:
                admission.leave(*inside.pop(step % len(inside)))
            continue
        tenant, count, size = step
        for _ in range(count):
            requests, held = Counter(name for name, _ in inside), Counter[str]()
            for name, each in inside:
                held[name] += each
            free, free_bytes = max_requests - len(inside), max_bytes - sum(held.values())
            fits = free >= 1 and free_bytes >= size
            try:
                admission.enter(tenant, size)
            except RequestError:
                share = requests[tenant] >= SHARE * free or held[tenant] >= SHARE * free_bytes
                assert not fits or (requests[tenant] and share)
            else:
                assert fits
                inside.append((tenant, size))
            assert admission.requests == len(inside) <= max_requests
            assert admission.bytes == sum(size for _, size in inside) <= max_bytes
