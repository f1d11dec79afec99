"""Sparse attention: what indexers choose, against transformers; what backward keeps; the check at start-up."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import (
    assert_close,
    assert_same,
    files_saved,
    grpo,
    make_backend,
    make_full,
    ok,
    saved,
    sft,
    spec,
    stock_logprobs,
    stock_terms,
    train,
)
from trainer_kinds import STEP, WHOLE
from transformers import AutoConfig

from skyrl.base.config.server import ConfigError
from skyrl.trainer.attention import indexers, packed_attention
from skyrl.trainer.attention.packed_attention import AttentionCall
from skyrl.trainer.attention.sparse import Chosen, packed, unpacked
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.packing import Grids, pack_alone
from tests.families import as_dense, make_family
from tests.local_ranks import rank_of

SPARSE = ("deepseek-v3.2", "glm-5", "glm-5.3-flash")
ONE_IN_CI = ["glm-5", *(pytest.param(family, marks=pytest.mark.slow) for family in SPARSE if family != "glm-5")]
FEW = 8
"""So many tokens are chosen in the tiny families."""
_directory = tempfile.TemporaryDirectory(prefix="skyrl-sparse-")


@functools.cache
def _path(family: str, topk: int = FEW) -> str:
    return make_family(family, Path(_directory.name) / str(topk), index_topk=topk)


def _data() -> list[Datum]:
    """Prompts with answers so short that several attend together, and sequences of many lengths."""
    return [*grpo(5, 1, 6, 60, answer=8), *grpo(6, 1, 3, 30, answer=20), *sft(4, 3, FEW, FEW + 1, 90)]


@pytest.mark.parametrize("family", ONE_IN_CI)
@pytest.mark.parametrize("recomputes", [False, True])
def test_shared_prompts_in_blocks_and_recomputed_give_transformers_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, recomputes: bool
) -> None:
    """A whole model's gradients, which come from every layer."""
    for module in (packed_attention, indexers):
        monkeypatch.setattr(module, "SCORES_BYTES", 20_000)
    backend = make_full(path=_path(family), gradient_checkpointing=recomputes, micro_batch_tokens=400)
    backend.create_model("m", WHOLE)
    loader = model_class(AutoConfig.from_pretrained(_path(family)))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    stock = loader.from_pretrained(_path(family), **plain, dtype=torch.float64).eval()
    data = _data()
    results = ok(backend.run([train("m", data[:9], "importance_sampling"), train("m", data[9:])]))
    assert results[0].metrics["computed_tokens:sum"] < 0.5 * results[0].metrics["num_tokens:sum"]
    loss = torch.zeros((), dtype=torch.float64)
    for datum, logprobs in zip(data, [each for result in results for each in result.logprobs], strict=True):
        expected = stock_logprobs(stock, datum)
        np.testing.assert_allclose(logprobs, expected.detach(), atol=2e-5)
        loss = loss + stock_terms(expected, datum).sum()
    loss.backward()
    found = files_saved(backend, "m", tmp_path / "state")
    ours = {name: each for name, each in found.items() if name.startswith("gradient.")}
    theirs = {f"gradient.{name}": one.grad for name, one in stock.named_parameters() if one.grad is not None}
    frozen = [name for name in ours if ".indexer." in name]
    assert frozen
    assert not any(bool(ours.pop(name).any()) for name in frozen)
    assert_close(ours, theirs, 1e-4)


def _learn(directory: Path, *data: Datum, **options: Any) -> dict[str, Tensor]:
    backend = make_backend(path=_path("glm-5"), **options)
    backend.create_model("m", spec(4, 11))
    for _ in range(2):
        ok(backend.run([train("m", list(data) or _data()[:9], "importance_sampling")]))
        backend.optim_step("m", STEP)
    return saved(backend, "m", directory)


def test_a_layer_that_is_computed_again_chooses_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _learn(tmp_path / "kept")
    choose: Callable[..., Chosen] = indexers._choose
    layers: list[int] = []

    def counted(indexer: Any, *args: Any) -> Chosen:
        layers.append(indexer.layer_idx)
        return choose(indexer, *args)

    monkeypatch.setattr(indexers, "_choose", counted)
    found = _learn(tmp_path / "recomputed", gradient_checkpointing=True)
    assert_same(found, expected)
    # At the start, and in two passes; the second of the three layers shares the first one's choice
    assert layers == [0, 2] * 3


def test_a_choice_is_kept_as_one_bit_for_each_pair_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Chosen] = []
    choose: Callable[..., Chosen] = indexers._choose
    monkeypatch.setattr(indexers, "_choose", lambda *args: kept.append(choose(*args)) or kept[-1])
    backend = make_backend(path=_path("glm-5"))
    backend.create_model("m", spec(4, 11))
    kept.clear()
    ok(backend.run([train("m", sft(1, 100))]))
    assert [[None if bits is None else bits.nbytes for bits in each.bits] for each in kept] == [[100 * 13]] * 2
    kept.clear()
    ok(backend.run([train("m", sft(1, FEW, 100))]))
    assert {tuple(bits is None for bits in each.bits) for each in kept} == {(False, True)}


@pytest.mark.parametrize("family", SPARSE[:2])
def test_within_the_indexers_number_of_tokens_attention_is_dense(tmp_path: Path, family: str) -> None:
    """The same bits as DeepSeek-V3 of the same weights, which has no indexer."""
    path = _path(family, 64)
    found = []
    for each in (path, as_dense(path, tmp_path / "dense")):
        backend = make_backend(path=each)
        backend.create_model("m", spec(4, 11))
        ok(backend.run([train("m", [*grpo(5, 1, 4, 50), *grpo(6, 2, 2, 30)], "importance_sampling")]))
        found.append(saved(backend, "m", tmp_path / str(len(found))))
    assert_same(*found)


@pytest.mark.parametrize("topk", [FEW, 2048])
@pytest.mark.parametrize(
    ("family", "part", "other"),
    [
        ("deepseek-v3.2", "_ROPE", indexers._ROPE | {"DeepseekV32Indexer": "apply_rotary_pos_emb_interleave"}),
        ("glm-5", "_sees_all", lambda indexer, tokens: True),
        ("glm-5.3-flash", "_pooled", lambda indexer, key, gate: key[:, : key.shape[1] // 4 * 4 : 4].float()),
    ],
)
def test_indexers_that_choose_otherwise_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, family: str, part: str, other: Any, topk: int
) -> None:
    """Also where the tokens of the comparison are fewer than those that the model chooses."""
    monkeypatch.setattr(indexers, part, other)
    with pytest.raises(ConfigError, match=r"chooses other tokens for its sparse attention on packed rows than in tran"):
        make_backend(path=_path(family, topk))


def test_a_layers_own_mask_shows_no_later_tokens() -> None:
    """Of GLM-5.3-Flash, whose layers make it of what indexers have chosen."""
    mask = torch.full((1, 1, 5, 5), -1e9).triu(1)
    AttentionCall("layer 1", None, None, (), mask).check()
    mask[0, 0, 2, 3] = 0
    with pytest.raises(ValueError, match="layer 1: a token sees later ones, which is not supported"):
        AttentionCall("layer 1", None, None, (), mask).check()


def test_an_indexer_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = make_family("glm-5.3-flash", tmp_path, index_kpool_always_select_tail=False)
    with pytest.raises(ConfigError, match=r"leaves out the last tokens \(index_kpool_always_select_tail\)"):
        make_backend(path=path)


def test_a_choice_can_be_written_by_rows_and_read_again() -> None:
    """`Chosen.from_rows` of a choice's rows is the choice, also of bundles and of grids with rows at their ends."""
    indexing = rank_of(make_backend(path=_path("glm-5"))).base.packed.indexing
    assert indexing.difference <= 0.02
    item = pack_alone(_data(), torch.device("cpu"))
    grids = Grids.of([item.groups], None, torch.device("cpu"))
    assert any(shape.together > 1 for shape, _ in grids.calls)
    rows = item.stop
    generator = torch.Generator().manual_seed(0)
    seen = Chosen((None,) * len(grids.calls)).of_rows(grids, rows)
    seen &= torch.rand(rows, rows, generator=generator) < 0.5
    assert torch.equal(Chosen.from_rows(seen, grids).of_rows(grids, rows), seen)


@pytest.mark.parametrize(("keys", "first"), [(8, 0), (13, 0), (5, 3), (9, 10), (1, 39)])
def test_bits_are_unpacked_from_any_token_on(keys: int, first: int) -> None:
    seen = torch.rand(3, 4, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(unpacked(packed(seen), keys, first), seen[..., first : first + keys])
