"""The bound on waiting samples: it is never exceeded, and a tenant with few samples finds room."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.base.wire.errors import RequestError
from skyrl.sampling.gate import Admission
from skyrl.storage.shares import SHARE


def fill(admission: Admission, tenant: str, size: int = 1, most: int = 100_000) -> int:
    """Enter samples until one is refused, `most` at most; returns how many were admitted."""
    for number in range(most):
        try:
            admission.enter(tenant, size)
        except RequestError:
            return number
    return most


def test_a_tenant_alone_leaves_a_ninth_of_the_requests_free() -> None:
    admission = Admission(9_000, 10**9)
    assert fill(admission, "a") == 8_000
    assert fill(admission, "b", most=500) == 500, "another tenant gets the free ninth"


def test_a_tenant_alone_leaves_a_ninth_of_the_bytes_free() -> None:
    admission = Admission(10**6, 9_000)
    assert fill(admission, "a", size=10) == 800
    assert fill(admission, "b", size=10, most=50) == 50


def test_tenants_that_all_want_more_converge_to_about_equal_shares() -> None:
    admission, held = Admission(9_000, 10**9), dict.fromkeys("abcd", 0)
    held["a"] = fill(admission, "a")
    for _ in range(500):
        for name in held:
            held[name] += fill(admission, name, most=40)
        for name in held:  # some samples of each tenant end
            for _ in range(min(20, held[name])):
                admission.leave(name, 1)
                held[name] -= 1
    for name in held:
        held[name] += fill(admission, name)
    assert max(held.values()) <= 1.3 * min(held.values())


@pytest.mark.parametrize("bound", range(1, 9))
def test_one_tenant_may_fill_a_small_bound(bound: int) -> None:
    assert fill(Admission(bound, 10**9), "a") == bound


def test_a_refusal_says_whether_the_tenants_share_or_the_whole_bound_is_full() -> None:
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


def test_a_body_larger_than_the_bound_is_admitted_alone() -> None:
    admission = Admission(10, 100)
    admission.enter("a", 500)
    with pytest.raises(RequestError):
        admission.enter("b", 1)
    admission.leave("a", 500)
    admission.enter("b", 100)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 40)),  # tenant, number of samples, bytes
        st.integers(0, 10**6),  # index of the sample that leaves
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(max_requests=st.integers(1, 200), max_bytes=st.integers(40, 4_000), steps=STEPS)
def test_samples_stay_below_the_bound_and_only_a_tenant_at_its_share_is_refused(max_requests, max_bytes, steps) -> None:
    """A tenant without samples is admitted as long as the sample fits. A tenant that is refused although the sample
    fits holds at least SHARE times the free space."""
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
            for name, sample_size in inside:
                held[name] += sample_size
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
