"""`Rounds` gives each thing once in a round, and looks for things only when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.base.rounds import Rounds


def test_a_round_gives_each_thing_once_and_the_next_one_begins_anew() -> None:
    things = [1, 2, 3, 4, 5]
    rounds = Rounds(lambda: list(things))
    assert [rounds.take(2), rounds.take(2), rounds.take(2)] == [[1, 2], [3, 4], [5]]
    assert not rounds.is_amid
    things.append(6)
    assert rounds.take(3) == [1, 2, 3]
    assert rounds.is_amid
    assert rounds.take(3) == [4, 5, 6]
    assert not rounds.is_amid, "a round ends also if its last part is full"
    assert rounds.take(3) == [1, 2, 3]


def test_nothing_is_looked_for_before_it_is_asked_for() -> None:
    looked = []

    def things() -> Iterator[int]:
        for number in range(100):
            looked.append(number)
            yield number

    assert Rounds(things).take(3) == [0, 1, 2]
    assert looked == [0, 1, 2, 3], "one more, which tells that there is more"


def test_without_things_a_round_is_empty() -> None:
    rounds = Rounds[int](list)
    assert [rounds.take(5), rounds.take(5)] == [[], []]
