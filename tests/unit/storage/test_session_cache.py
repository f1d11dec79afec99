"""The cache of objects by session: what is kept is found, and a session's end drops its objects and no others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.storage.db import row_caches
from skyrl.storage.db.row_caches import SessionCache


@dataclass(frozen=True)
class Each:
    id: str
    session_id: str


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(0, 5)),
            st.tuples(st.just("drop"), st.integers(0, 5)),
            st.tuples(st.just("drop_session"), st.integers(0, 2)),
        )
    )
)
def test_it_holds_what_a_plain_dictionary_would(steps: list[tuple[str, int]]) -> None:
    cache: SessionCache[Each] = SessionCache()
    plain: dict[str, Each] = {}
    for step, number in steps:
        if step == "keep":
            each = Each(f"o{number}", f"s{number % 3}")
            cache.keep(each)
            plain[each.id] = each
        elif step == "drop":
            cache.drop(f"o{number}")
            plain.pop(f"o{number}", None)
        else:
            cache.drop_session(f"s{number}")
            plain = {key: each for key, each in plain.items() if each.session_id != f"s{number}"}
        assert len(cache) == len(plain)
        assert [cache.get(f"o{at}") for at in range(6)] == [plain.get(f"o{at}") for at in range(6)]
    for number in range(3):
        cache.drop_session(f"s{number}")
    assert cache._ids_of == {}, "nothing is left of sessions that have ended"


def test_the_first_objects_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_caches, "MOST_KEPT", 3)
    cache: SessionCache[Each] = SessionCache()
    for number in range(5):
        cache.keep(Each(f"o{number}", f"s{number % 2}"))
    assert [cache.get(f"o{at}") is not None for at in range(5)] == [False, False, True, True, True]
    cache.drop_session("s0")
    assert [cache.get(f"o{at}") is not None for at in range(5)] == [False, False, False, True, False]
