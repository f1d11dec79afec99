"""Attention in sequences of any lengths beside attention on grids, with a reference in the place of torch's kernel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.operation_counts import Operations
from skyrl.base.config.server import ConfigError
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.attention import packed_attention, varlen
from skyrl.trainer.attention.packed_attention import PackedGroups, segments_attention
from skyrl.trainer.attention.varlen import Sequences, attend_in_sequences, fits, missing_in_torch, usable_on
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.ranks import sharded_model
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows.packing import PackedItem, pack
from skyrl.trainer.rows.prefixes import lay_out, prefix_tree
from tests.local_ranks import rank_of
from tests.unit.torch_lora_support import VOCAB, make_backend
from tests.unit.varlen_reference import use_reference

CPU = torch.device("cpu")
DIM = 8
Tree = list[tuple[int, int]]
LAYOUTS: dict[str, list[Tree]] = {
    "uniform": [[(-1, 12)] * 4],
    "ragged": [[(-1, 1), (-1, 17), (-1, 16), (-1, 40)]],
    "shared": [[(-1, 20), *[(0, length) for length in (9, 9, 8, 3, 1, 7)]]],
    "nested": [[(-1, 18), (0, 17), (1, 16), *[(2, 5)] * 3, *[(2, 7)] * 2, (0, 4), (-1, 6)]],
    "slices": [[(-1, 5)] * 2, [(-1, 30), *[(0, 4)] * 8], [(-1, 16), (0, 2), (0, 16), (2, 3), (2, 3)]],
}
"""Of each slice: ranges of rows, as turns of conversations are. Each continues the range of this number (-1: none) by
so many rows. Ranges that none continues end a sequence."""


def _data(tree: Tree) -> list[Datum]:
    token = iter(range(100_000))
    texts: list[list[int]] = []
    for parent, rows in tree:
        texts.append((texts[parent] if parent >= 0 else []) + [next(token) for _ in range(rows)])
    continued = {parent for parent, _ in tree}
    return [Datum(np.array(text), {}) for number, text in enumerate(texts) if number not in continued]


def _groups(slices: Sequence[Tree]) -> PackedGroups:
    packed: list[PackedItem] = []
    for tree in slices:
        data = _data(tree)
        layout = lay_out(prefix_tree(data), range(len(data)))
        packed.append(pack(data, layout, packed[-1].stop if packed else 0, CPU))
    return PackedGroups([each.groups for each in packed], varlen=True)


def _states(rows: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value as layers give them, [1, heads, rows, DIM]; and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    made = [torch.randn(1, rows, count, DIM, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)]
    of_output = torch.randn(1, rows, heads, DIM, generator=generator).to(dtype)
    return [*(each.transpose(1, 2).requires_grad_() for each in made), of_output]


def _on_grids(groups: PackedGroups, states: list[Tensor], window: int | None) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *leaves, of_output = states
    plain = PackedGroups(groups)
    output, _ = segments_attention(
        nn.Module(), *leaves, attention_mask=None, attention_groups=plain, sliding_window=window, scaling=0.3
    )
    return [output, *torch.autograd.grad(output, leaves, of_output)]


def _in_sequences(sequences: Sequences, states: list[Tensor]) -> list[Tensor]:
    use_reference()
    *leaves, of_output = states
    output = attend_in_sequences(*(each[0].transpose(0, 1) for each in leaves), sequences=sequences, scale=0.3)[None]
    return [output, *torch.autograd.grad(output, leaves, of_output)]


def _rows(groups: PackedGroups) -> int:
    return sum(sum(group.lengths) for of_slice in groups for group in of_slice)


def _made(groups: PackedGroups, window: int | None, *, split: bool) -> Sequences:
    with patch.object(varlen, "SPLIT_COPIES", -1 if split else 1000):
        found = Sequences.of(groups, window, CPU)
    assert found is not None
    return found


WINDOWS = [(None, False), (None, True), (1000, True), (1, False), (4, False), (19, False)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("window", "split"), WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_outputs_and_gradients_are_those_of_grids(
    name: str, window: int | None, split: bool, heads: int, kv_heads: int
) -> None:
    groups = _groups(LAYOUTS[name])
    sequences = _made(groups, window, split=split)
    assert (sequences.prefixes is not None) == (split and name not in ("uniform", "ragged"))
    states = _states(_rows(groups), heads, kv_heads)
    for found, expected in zip(_in_sequences(sequences, states), _on_grids(groups, states, window), strict=True):
        assert bool(expected.any())
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["nested", "slices"])
@pytest.mark.parametrize("split", [False, True], ids=["copies", "a-call-for-prefixes"])
def test_bfloat16_is_as_exact_as_on_grids(name: str, split: bool) -> None:
    """The errors beside float32, which are rounding."""
    groups = _groups(LAYOUTS[name])
    sequences = _made(groups, None, split=split)
    exact = _on_grids(groups, _states(_rows(groups), 6, 2), None)
    states = _states(_rows(groups), 6, 2, torch.bfloat16)
    for right, one, other in zip(exact, _in_sequences(sequences, states), _on_grids(groups, states, None), strict=True):
        assert one.dtype == torch.bfloat16
        errors = [float((found.float() - right).detach().norm() / right.detach().norm()) for found in (one, other)]
        assert 0 < errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_the_references_gradients_are_those_of_its_result(window: tuple[int, int]) -> None:
    """Its backward is a formula. Through torch's own function, which sets up its operations for autograd."""
    use_reference()
    leaves = [each[0].detach().transpose(0, 1).requires_grad_() for each in _states(9, 4, 2)[:3]]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    output = varlen._kernel()(*leaves, ends, ends, 5, 5, scale=None, window_size=window)[0]
    found = torch.autograd.grad(output.square().sum(), leaves)
    parts = [[each[first:end].transpose(0, 1)[None] for each in leaves] for first, end in ((0, 4), (4, 9))]
    expected = []
    for part in parts:
        distance = torch.arange(part[0].shape[2])[:, None] - torch.arange(part[0].shape[2])
        mask = (distance <= (window[0] if window[0] >= 0 else 9)) & (-distance <= (window[1] if window[1] >= 0 else 9))
        made = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=mask, enable_gqa=True)
        expected.append(made[0].transpose(0, 1))
    torch.testing.assert_close(output, torch.cat(expected))
    of_parts = torch.autograd.grad(torch.cat(expected).square().sum(), leaves)
    torch.testing.assert_close(found, of_parts, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("split", [False, True], ids=["copies", "a-call-for-prefixes"])
def test_the_backward_keeps_rows_and_no_copies(split: bool) -> None:
    use_reference()
    groups = _groups(LAYOUTS["slices"])
    sequences = _made(groups, None, split=split)
    rows = _rows(groups)
    assert sequences.copied > 0
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        _ = attend_in_sequences(
            *(each[0].transpose(0, 1) for each in _states(rows, 6, 2)[:3]), sequences=sequences, scale=None
        )
    assert [tuple(each.shape) for each in kept] == [(rows, 6, DIM), *[(rows, 2, DIM)] * 2, (rows, 6, DIM), (6, rows)]


@pytest.mark.parametrize("split", [False, True], ids=["copies", "a-call-for-prefixes"])
def test_torchs_own_description_of_the_kernel_takes_the_arguments(split: bool) -> None:
    """Forward and backward on tensors without numbers: shapes and dtypes come from torch's registration."""
    assert missing_in_torch() is None
    groups = _groups(LAYOUTS["slices"])
    states = _states(_rows(groups), 6, 2, torch.bfloat16)
    sequences = _made(groups, None, split=split)
    with FakeTensorMode(allow_non_fake_inputs=True):
        *leaves, of_output = (torch.empty_like(each, requires_grad=each.requires_grad) for each in states)
        assert fits(*leaves)
        output = attend_in_sequences(*(each[0].transpose(0, 1) for each in leaves), sequences=sequences, scale=None)
        assert (output.shape, output.dtype) == (of_output.shape[1:], torch.bfloat16)
        found = torch.autograd.grad(output, leaves, of_output[0])
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in leaves]


def _grouped(samples: int, prompt: int, answer: int) -> PackedGroups:
    return _groups([[(-1, prompt), *[(0, answer)] * samples]])


@pytest.mark.parametrize(
    ("samples", "prompt", "answer", "window", "copied"),
    [
        (4, 512, 512, None, 4 * 512),  # 0.8 copies for each row
        (16, 512, 64, None, 512),  # 5.3 would be: prefixes have a call of their own
        (64, 4096, 64, None, 4096),
        (16, 512, 64, 128, 16 * 127),
        (16, 512, 64, 1000, 512),  # no query is so far from its first key
        (128, 2048, 8, 1024, None),  # 43 copies for each row
    ],
)
def test_which_way_is_chosen_by_the_rows_that_it_copies(
    samples: int, prompt: int, answer: int, window: int | None, copied: int | None
) -> None:
    sequences = Sequences.of(_grouped(samples, prompt, answer), window, CPU)
    assert (None if sequences is None else sequences.copied) == copied


def test_layers_that_the_kernel_does_not_fit_attend_on_grids() -> None:
    groups = _groups(LAYOUTS["shared"])
    query, key, value, _ = _states(_rows(groups), 6, 2, torch.bfloat16)
    assert fits(query, key, value)
    for dtype, head_dim, value_dim in ((torch.float32, 8, 8), (torch.bfloat16, 12, 12), (torch.bfloat16, 264, 264)):
        assert not fits(*(torch.empty(1, 1, 1, dim, dtype=dtype) for dim in (head_dim, head_dim, value_dim)))
    assert not fits(*(torch.empty(1, 1, 1, dim, dtype=torch.bfloat16) for dim in (24, 24, 16)))
    for options in ({"softcap": 2.0}, {"s_aux": torch.zeros(6)}):
        given: dict[str, Any] = {"attention_mask": None, **options}
        expected, _ = segments_attention(nn.Module(), query, key, value, attention_groups=PackedGroups(groups), **given)
        with patch.object(packed_attention, "attend_in_sequences", side_effect=AssertionError):
            found, _ = segments_attention(nn.Module(), query, key, value, attention_groups=groups, **given)
        assert torch.equal(found, expected)


def _counted(groups: PackedGroups, window: int | None) -> int:
    """Operations that one layer's attention starts, forward and backward, on a GPU."""
    use_reference()
    *leaves, of_output = _states(_rows(groups), 6, 2, torch.bfloat16)
    options: dict[str, Any] = {"attention_groups": groups, "sliding_window": window}
    with patch.object(packed_attention, "wants_all_heads", lambda device: True):
        segments_attention(nn.Module(), *leaves, attention_mask=None, **options)  # the first layer makes what all use
        with Operations() as operations:
            output, _ = segments_attention(nn.Module(), *leaves, attention_mask=None, **options)
            torch.autograd.grad(output, leaves, of_output)
    return sum(counts.total() for counts in operations.counts.values())


def _batch(kind: str) -> PackedGroups:
    lengths = np.random.default_rng(0).integers(32, 97, (4, 16)).tolist()
    if kind == "uniform":
        return _groups([[(-1, 64)] * 8])
    if kind == "ragged":
        return _groups([[(-1, length) for length in lengths[0]]])
    return _groups([[(-1, 128), *[(0, length) for length in of_group]] for of_group in lengths])


@pytest.mark.parametrize(
    ("kind", "window", "most"), [("uniform", None, 2), ("ragged", None, 2), ("ragged", 16, 2), ("grpo", 16, 8)]
)
def test_the_operations_of_a_layer_do_not_depend_on_lengths(kind: str, window: int | None, most: int) -> None:
    """Each call counts as one. With prefixes copied: two gathers, twice, and two sums."""
    groups = _batch(kind)
    assert _counted(groups, window) == most
    on_grids = _counted(PackedGroups(groups), window)
    assert on_grids >= (2 if kind == "uniform" else 5 * most)


def test_a_call_of_their_own_for_prefixes_has_as_many_operations_for_any_groups() -> None:
    found = {_counted(_grouped(samples, 128, answer), None) for samples, answer in ((16, 8), (64, 8), (24, 5))}
    assert len(found) == 1
    assert found.pop() == 12 + 9


def _train(backend: LoraBackend) -> list[Tensor]:
    """Logprobs, and the adapter's gradient."""
    backend.create_model("m", LoraSpec(4, 32.0, 3))
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, VOCAB, 30)
    texts = [np.concatenate([prompt, rng.integers(0, VOCAB, length)]) for length in (9, 4, 9, 8)]
    texts += [rng.integers(0, VOCAB, length) for length in (13, 31)]
    data = [
        Datum(text[:-1], {"target_tokens": text[1:], "weights": np.ones(len(text) - 1, np.float32)}) for text in texts
    ]
    (result,) = backend.run([TrainingPass("m", data, "cross_entropy")])
    assert not isinstance(result, Exception), result
    gradients = rank_of(backend).adapters["m"].gradient
    assert gradients is not None
    return [torch.from_numpy(np.concatenate(result.logprobs)), gradients]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-window"])
def test_a_model_trains_the_same(architecture: str) -> None:
    """Also with layers that are computed again, to the bit; and the check at the start compares the logits."""
    use_reference()
    expected = _train(make_backend(architecture))
    with (
        patch.object(sharded_model, "usable_on", lambda device: True),
        patch.object(varlen, "DTYPES", (torch.float32,)),
        patch.object(varlen, "HEAD_DIM_STEP", 4),
        patch.object(packed_attention, "attend", side_effect=AssertionError("on grids")),
    ):
        found, again = (
            _train(make_backend(architecture, attention="varlen", gradient_checkpointing=recomputed))
            for recomputed in (False, True)
        )
    for one, other, right in zip(found, again, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right, atol=1e-5 * float(right.abs().max()), rtol=1e-4)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.attention: varlen needs a CUDA device .* computes on a CPU"):
        make_backend(attention="varlen")


@pytest.mark.parametrize("lacks", ["module", "windows", "backward"])
def test_a_torch_without_the_kernel_is_said(lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    from torch.nn.attention import varlen as of_torch

    missing: Any = {
        "module": patch.dict(sys.modules, {"torch.nn.attention.varlen": None}),
        "windows": patch.object(of_torch, "varlen_attn", lambda query, key, value, is_causal: None),
        "backward": patch.object(varlen, "_BACKWARD", ("grad_out",)),
    }[lacks]
    with (
        missing,
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        assert not usable_on(torch.device("cuda"))
    assert "sdpa instead of varlen" in caplog.text
