"""Attention to keys that come in parts, against attention to all keys at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl.trainer.attention import divided
from skyrl.trainer.attention.divided import Attended, Scoring, SoftmaxSum, attend_to, gradients_to
from skyrl.trainer.attention.packed_attention import attend

HEADS, KV_HEADS, DIM, VALUE_DIM, ROWS = 6, 2, 8, 5, 300
BOUNDS = (0, 90, 170, ROWS)
"""Of the parts in which keys come."""
FIRST_QUERY = BOUNDS[-2]


def _states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, ROWS - FIRST_QUERY, DIM), (KV_HEADS, ROWS, DIM), (KV_HEADS, ROWS, VALUE_DIM))
    return [(torch.randn(*shape, generator=generator) * 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize("bytes_of_block", [2**24, 0], ids=["one-block", "blocks"])
def test_keys_in_parts_give_the_result_and_gradients_of_all_keys(
    monkeypatch: pytest.MonkeyPatch, with_sinks: bool, softcap: float | None, window: int | None, bytes_of_block: int
) -> None:
    monkeypatch.setattr(divided, "BLOCK_BYTES", bytes_of_block)
    query, key, value = _states()
    sinks = torch.linspace(-1, 2, HEADS) if with_sinks else None
    apart = torch.arange(FIRST_QUERY, ROWS)[:, None] - torch.arange(ROWS)
    mask = (apart >= 0) & (apart < (window or ROWS))
    expected = attend(
        query[None], key[None], value[None], mask=mask, causal=False, scale=0.3, softcap=softcap, sinks=sinks
    )[0]
    of_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    of_expected = torch.autograd.grad(expected, (query, key, value), of_output)

    scoring = Scoring(0.3, window, softcap)
    parts = [slice(*pair) for pair in reversed(list(zip(BOUNDS, BOUNDS[1:], strict=False)))]
    running = SoftmaxSum.begin(query, VALUE_DIM, sinks)
    with torch.no_grad():
        for part in parts:
            attend_to(running, query, key[:, part], value[:, part], FIRST_QUERY - part.start, scoring)
        torch.testing.assert_close(running.output, expected, rtol=1e-5, atol=1e-5)
        attended = Attended(query, running.sums, of_output, (of_output * running.output).sum(-1))
        found = [torch.zeros_like(each) for each in (query, key, value)]
        for part in parts:
            of_key, of_value = (each[:, part] for each in found[1:])
            distance = FIRST_QUERY - part.start
            gradients_to(found[0], of_key, of_value, attended, key[:, part], value[:, part], distance, scoring)
    for gradient, of_all in zip(found, of_expected, strict=True):
        torch.testing.assert_close(gradient, of_all, rtol=1e-4, atol=1e-5)
