"""Attention with soft-capping and sinks against the formulas in float64, and attention to keys that come in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl.trainer.attention import divided, packed_attention
from skyrl.trainer.attention.divided import Attended, Scoring, SoftmaxSum, attend_to, gradients_to
from skyrl.trainer.attention.packed_attention import attend, for_all_heads, segments_attention
from skyrl.trainer.attention.relative import RelativeBias
from skyrl.trainer.rows.packing import AttentionGroup

COUNT, HEADS, KV_HEADS, DIM, VALUE_DIM = 3, 6, 2, 8, 5


def _states(rows: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    shapes = ((HEADS, rows, DIM), (KV_HEADS, length, DIM), (KV_HEADS, length, VALUE_DIM))
    made = [torch.randn(COUNT, *shape, generator=generator) * 2 for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in made), torch.randn(HEADS, generator=generator).requires_grad_()]


def _formula(
    states: list[Tensor], mask: Tensor, scale: float | None, softcap: float | None, with_sinks: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The result in float64, one score at a time written out, and the gradients of the sum of its squares."""
    query, key, value, sinks = [state.detach().double().requires_grad_() for state in states]
    group = HEADS // KV_HEADS
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("chqd,chkd->chqk", query, keys) * (DIM**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    exponentials = scores.exp() * mask
    total = exponentials.sum(dim=3, keepdim=True)
    if with_sinks:
        total = total + sinks.exp()[None, :, None, None]
    output = torch.einsum("chqk,chkd->chqd", exponentials / total, values)
    output.square().sum().backward()
    return output.detach(), [query.grad, key.grad, value.grad, *([sinks.grad] if with_sinks else [])]


def _mask(kind: str, rows: int, length: int) -> Tensor:
    if kind == "causal":
        return torch.ones(rows, length, dtype=torch.bool).tril()
    if kind == "window":
        return torch.ones(rows, length, dtype=torch.bool).tril(length - rows).triu(length - rows - 3)
    lengths = torch.tensor([length, length - 2, 1])
    return (torch.arange(length) < lengths[:, None])[:, None, None, :].expand(COUNT, 1, rows, length)


@pytest.mark.parametrize("block_bytes", [2**20, COUNT * HEADS * 9 * 4 * 2])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize(
    ("kind", "rows", "scale"), [("causal", 9, None), ("window", 9, 0.2), ("window", 4, None), ("lengths", 4, 0.5)]
)
def test_attention_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rows: int,
    scale: float | None,
    softcap: float | None,
    with_sinks: bool,
    block_bytes: int,
) -> None:
    """Also in blocks of two queries, which backward computes again."""
    monkeypatch.setattr(packed_attention, "SCORES_BYTES", block_bytes)
    states = _states(rows, 9)
    mask = _mask(kind, rows, 9)
    expected, gradients = _formula(states, mask, scale, softcap, with_sinks)
    query, key, value, sinks = states
    options: dict[str, Any] = {"softcap": softcap, "sinks": sinks if with_sinks else None}
    causal = kind == "causal"
    found = attend(query, key, value, mask=None if causal else mask, causal=causal, scale=scale, **options)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    found.square().sum().backward()
    for state, gradient in zip(states, gradients, strict=False):
        assert state.grad is not None
        torch.testing.assert_close(state.grad.double(), gradient, atol=1e-4, rtol=1e-4)


MIXED, EXTENT = 3, 6
"""States of a query for its biases, and the distances that have one."""


def _relative(*shape: int) -> RelativeBias:
    generator = torch.Generator().manual_seed(3)
    states, profiles = (torch.randn(*each, generator=generator) for each in ((*shape, MIXED), (MIXED, EXTENT)))
    return RelativeBias(states.requires_grad_(), profiles.requires_grad_())


def _biases(relative: RelativeBias, distance: Tensor) -> Tensor:
    """One distance at a time written out."""
    made = torch.zeros(*relative.states.shape[:-1], distance.shape[1], dtype=torch.float64)
    for apart in range(EXTENT):
        product = relative.states.double() @ relative.profiles[:, apart].double()
        made = made + product[..., None] * (distance == apart)
    return made


@pytest.mark.parametrize("block_bytes", [2**20, COUNT * HEADS * (9 + EXTENT) * 4 * 2], ids=["one-block", "blocks"])
@pytest.mark.parametrize("kind", ["causal", "window", "lengths"])
def test_relative_biases_equal_the_formula(monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int) -> None:
    monkeypatch.setattr(packed_attention, "SCORES_BYTES", block_bytes)
    rows = 4 if kind == "lengths" else 9
    states, relative, mask = _states(rows, 9)[:3], _relative(COUNT, HEADS, rows), _mask(kind, rows, 9)
    places = torch.arange(9 - rows, 9), torch.arange(9)
    distance = places[0][:, None] - places[1]
    leaves = [*states, relative.states, relative.profiles]
    query, key, value = (state.double() for state in states)
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3 + _biases(relative, distance)
    expected = scores.masked_fill(~mask, -1e9).softmax(-1) @ values
    causal = kind == "causal"
    found = attend(*states, mask=None if causal else mask, causal=causal, scale=0.3, relative=relative, places=places)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    of_output = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad(expected, leaves, of_output.double())
    for one, other in zip(torch.autograd.grad(found, leaves, of_output), theirs, strict=True):
        assert bool(other.any())
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_keys_and_values_of_all_heads_give_the_same_attention_and_gradients() -> None:
    """On CUDA this form is used with a mask."""
    mask = _mask("window", 4, 9)
    states = _states(4, 9)
    expected, gradients = _formula(states, mask, None, None, False)
    query, key, value, _ = states
    all_keys, all_values = for_all_heads(key, HEADS), for_all_heads(value, HEADS)
    assert all_keys.shape == (COUNT, HEADS, 9, DIM)
    found = attend(query, all_keys, all_values, mask=mask, causal=False, scale=None)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    found.square().sum().backward()
    for state, gradient in zip(states, gradients, strict=False):
        assert state.grad is not None
        torch.testing.assert_close(state.grad.double(), gradient, atol=1e-4, rtol=1e-4)


def test_a_query_that_sees_no_key_stays_finite() -> None:
    """Padding has such queries. Their rows are dropped, but their gradients are added to those of real keys."""
    query, key, value, sinks = _states(2, 3)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    found = attend(query, key, value, mask=mask, causal=False, scale=None, softcap=3.0)
    found[:, :, :1].sum().backward()
    assert all(bool(state.grad.isfinite().all()) for state in (query, key, value) if state.grad is not None)
    assert found.isfinite().all()


def test_bfloat16_scores_have_a_float32_softmax() -> None:
    states = [state.detach().bfloat16() for state in _states(9, 9)[:3]] + [_states(9, 9)[3].detach()]
    expected, _ = _formula(states, _mask("causal", 9, 9), None, 1.5, True)
    query, key, value, sinks = states
    found = attend(query, key, value, mask=None, causal=True, scale=None, softcap=1.5, sinks=sinks)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.03)


def test_gradients_of_many_blocks_are_as_exact_in_bfloat16_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block gives one to the same keys, values and sinks."""
    rows, heads = 512, 2
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, rows, DIM), (1, rows, DIM), (1, rows, VALUE_DIM), (rows, heads, VALUE_DIM))
    query, key, value, of_output = (torch.randn(1, *shape, generator=generator).bfloat16() for shape in shapes)
    # All gradients of a sink have one sign
    states = [query, key, value.abs(), torch.full((heads,), 3.0).bfloat16()]
    of_output = of_output.abs()
    groups = [[AttentionGroup((rows,), (rows,), ())]]

    def gradients(dtype: torch.dtype, rows_of_a_block: int) -> list[Tensor]:
        monkeypatch.setattr(packed_attention, "SCORES_BYTES", rows_of_a_block * heads * rows * 4)
        leaves = [state.to(dtype).requires_grad_() for state in states]
        queries, keys, values, sinks = leaves
        found, _ = segments_attention(nn.Module(), queries, keys, values, None, attention_groups=groups, s_aux=sinks)
        return [each.float() for each in torch.autograd.grad(found, leaves, of_output.to(dtype))]

    exact = gradients(torch.float32, rows)
    of_one, of_many = (gradients(torch.bfloat16, of_block) for of_block in (rows, 1))
    for right, one, many in zip(exact, of_one, of_many, strict=True):
        errors = [float((found - right).norm() / right.norm()) for found in (one, many)]
        assert 0 < errors[1] <= 1.5 * errors[0]


KEYS = 300
BOUNDS = (0, 90, 170, KEYS)
"""Of the parts in which keys come."""
FIRST_QUERY = BOUNDS[-2]


def _many_states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, KEYS - FIRST_QUERY, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, VALUE_DIM))
    return [(torch.randn(*shape, generator=generator) * 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("bytes_of_block", [2**24, 0], ids=["one-block", "blocks"])
@pytest.mark.parametrize("window", [None, 3])
def test_keys_in_parts_have_relative_biases(
    monkeypatch: pytest.MonkeyPatch, window: int | None, bytes_of_block: int
) -> None:
    monkeypatch.setattr(divided, "BLOCK_BYTES", bytes_of_block)
    query, key, value = _many_states()
    relative, places = _relative(HEADS, KEYS - FIRST_QUERY), (torch.arange(FIRST_QUERY, KEYS), torch.arange(KEYS))
    distance = places[0][:, None] - places[1]
    mask = (distance >= 0) & (distance < (window or KEYS))
    of_all = RelativeBias(relative.states[None], relative.profiles)
    states = [state[None] for state in (query, key, value)]
    expected = attend(*states, mask=mask, causal=False, scale=0.3, relative=of_all, places=places)[0]
    of_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    leaves = (query, key, value, relative.states, relative.profiles)
    of_expected = torch.autograd.grad(expected, leaves, of_output)

    scoring = Scoring(0.3, window)
    parts = [slice(*pair) for pair in reversed(list(zip(BOUNDS, BOUNDS[1:], strict=False)))]
    running, found = SoftmaxSum.begin(query, VALUE_DIM, None), relative.zeros()
    with torch.no_grad():
        for part in parts:
            keys = key[:, part], value[:, part]
            attend_to(running, query, *keys, FIRST_QUERY - part.start, scoring, relative=relative)
        torch.testing.assert_close(running.output, expected, rtol=1e-5, atol=1e-5)
        delta = (of_output * running.output).sum(-1)
        attended = Attended(query, running.sums, of_output, delta, relative, found)
        sums = [torch.zeros_like(each) for each in (query, key, value)]
        for part in parts:
            keys, values = key[:, part], value[:, part]
            of_key, of_value = sums[1][:, part], sums[2][:, part]
            gradients_to(sums[0], of_key, of_value, attended, keys, values, FIRST_QUERY - part.start, scoring)
    for gradient, other in zip((*sums, found.states, found.profiles), of_expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize("bytes_of_block", [2**24, 0], ids=["one-block", "blocks"])
def test_keys_in_parts_give_the_result_and_gradients_of_all_keys(
    monkeypatch: pytest.MonkeyPatch, with_sinks: bool, softcap: float | None, window: int | None, bytes_of_block: int
) -> None:
    monkeypatch.setattr(divided, "BLOCK_BYTES", bytes_of_block)
    query, key, value = _many_states()
    sinks = torch.linspace(-1, 2, HEADS) if with_sinks else None
    apart = torch.arange(FIRST_QUERY, KEYS)[:, None] - torch.arange(KEYS)
    mask = (apart >= 0) & (apart < (window or KEYS))
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
