"""What two versions of a tensor differ in."""

from __future__ import annotations

import pytest
import torch

from skyrl.weights import deltas
from skyrl.weights.deltas import POSITIONS, VALUES, delta, patch

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_old_tensor_and_what_differs_make_the_new_one_bit_by_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "_CHUNK", 100)
    old = torch.zeros(30, 40).to(dtype)
    new = old.clone()
    new.view(-1)[torch.tensor([0, 99, 100, 1199])] = torch.ones(4).to(dtype)
    found = delta("a", old, new)
    assert found["a" + POSITIONS].tolist() == [0, 99, 100, 1199]
    patch(old, found["a" + POSITIONS], found["a" + VALUES])
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    assert delta("a", old, new) == {}


def test_the_bits_are_compared_and_not_the_numbers() -> None:
    old, new = torch.zeros(100), torch.zeros(100)
    new[3] = -0.0
    new[7] = old[7] = torch.nan
    assert delta("a", old, new)["a" + POSITIONS].tolist() == [3]


def test_a_tensor_of_which_much_changed_is_there_as_a_whole() -> None:
    old, new = torch.zeros(100), torch.zeros(100)
    new[:50] = 1
    assert list(delta("a", old, new)) == ["a"]
    assert list(delta("s", torch.tensor(1.0), torch.tensor(2.0))) == ["s"]
    assert delta("e", torch.empty(0, 2), torch.empty(0, 2)) == {}


@pytest.mark.parametrize(
    ("positions", "values", "message"),
    [
        (torch.tensor([4]), torch.zeros(1), "beyond the 4"),
        (torch.tensor([-1]), torch.zeros(1), "beyond the 4"),
        (torch.tensor([0, 1]), torch.zeros(1), "shape"),
        (torch.tensor([0.0]), torch.zeros(1), "float32"),
        (torch.tensor([0]), torch.zeros(1, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_what_does_not_fit_changes_nothing(positions: torch.Tensor, values: torch.Tensor, message: str) -> None:
    tensor = torch.ones(2, 2)
    with pytest.raises(ValueError, match=message):
        patch(tensor, positions, values)
    assert tensor.tolist() == [[1, 1], [1, 1]]
