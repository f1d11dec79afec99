"""The memory of a pass by config.json is what the trainer keeps, and where it cuts."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function
from torch_lora_support import base_path, make_backend, ok, sft, spec, train

from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import (
    BACKWARD_WIDTHS,
    GAPS,
    IN_PIECES_WIDTHS,
    LARGE_ROWS,
    LOGITS_BYTES,
    LOGITS_CHUNKS,
    SHARE,
    STEP_BUFFERS,
    Passing,
    Widths,
)
from skyrl.trainer.model import row_budget
from skyrl.trainer.model.recomputation import _product_bytes
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import LoraRank
from tests.families import FAMILIES, make_family
from tests.local_ranks import rank_of

QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
}
MUCH = 1e12


def _config(path: str) -> dict[str, Any]:
    return json.loads((Path(path) / "config.json").read_text())


def _passing(rows: int = 2048, longest: int = 4096) -> Passing:
    widths = Widths.of(QWEN)
    assert widths is not None
    return Passing(widths, 32, rows, longest)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma-3"])
def test_a_layer_keeps_the_numbers_that_its_config_says(architecture: str, tmp_path: Path) -> None:
    """Its products and an adapter have them, too."""
    path = make_family(architecture, tmp_path) if architecture in FAMILIES else base_path(architecture)
    widths = Widths.of(_config(path))
    assert widths is not None
    backend = make_backend(path=path)
    rank = 4
    backend.create_model("m", spec(rank))
    ok(backend.run([train("m", sft(0, 64, 64))]))
    packed = rank_of(backend).base.packed
    assert packed.recomputation is not None
    kept = packed.recomputation.bytes_of_row
    expected = 4 * widths.layers * widths.kept_numbers(rank)
    shared = 4 * 4 * widths.queries // widths.heads + 4 * 64 * (architecture in FAMILIES)
    """Sines and cosines of positions, up to two of each, and a mask for windows, which layers share."""
    of_last_norm = 4 * (2 * widths.hidden + 1)
    assert expected <= kept <= expected + shared + of_last_norm
    assert _product_bytes(list(packed.decoder_layers)) == 4 * widths.layers * widths.products
    assert len(rank_of(backend).adapters["m"].weights) == widths.adapter_numbers(rank)


def _risen(profiler: profile, name: str) -> int:
    """The most bytes that tensors took during the operation `name`, beside those before it."""
    assert profiler.profiler is not None
    found: Any = profiler.profiler.kineto_results
    events = sorted(found.events(), key=lambda event: event.start_ns())
    (whole,) = (event for event in events if event.name() == name)
    within = range(whole.start_ns(), whole.end_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() in within]
    return max(accumulate(sizes))


@pytest.mark.parametrize(("architecture", "tensors"), [("qwen2", IN_PIECES_WIDTHS), ("gemma-3", BACKWARD_WIDTHS)])
def test_the_backward_of_a_layer_needs_some_tensors_of_the_mlps_width(
    architecture: str, tensors: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(path=make_family(architecture, tmp_path, intermediate_size=2048))
    backend.create_model("m", spec(4))
    of_rank = record_function("of_rank")(LoraRank._backward)
    monkeypatch.setattr(LoraRank, "_backward", of_rank)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ok(backend.run([train("m", sft(0, 120))]))
    assert tensors / 2 < _risen(profiler, "of_rank") / (4 * 120 * 2048) < tensors


def test_micro_batches_have_the_rows_that_the_trainer_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = Widths.of(_config(base_path("qwen3")))
    assert widths is not None
    of_row = 2 * 4 * widths.layers * widths.products
    config = load_config({"base_model": base_path("qwen3")})
    rows = []
    for memory in (2.1 * 2048 * of_row, 2.1 * 4096 * of_row):
        backend = make_backend()
        parameters = 4 * sum(each.numel() for each in rank_of(backend).base.packed.parameters())
        monkeypatch.setattr(row_budget, "limit_bytes", lambda memory=memory, base=parameters: memory + base)
        rows.append(LoraBackend(config).micro_batch_tokens)
        assert Passing.of(widths, 32, memory, None, 64).rows == rows[-1]
    assert rows == [2048, 4096]
    assert Passing.of(widths, 32, memory, 100, 64).rows == 100, "trainer.micro_batch_tokens"


def test_a_pass_takes_what_it_keeps_three_chunks_of_logits_and_four_buffers_of_the_adapter() -> None:
    passing = _passing()
    adapter = 4 * 32 * (24 * 22_912 + 896 + 151_936)
    kept = 4 * 1024 * 24 * (2 * 896 + 2 + 4 * 896 // 2 + 4 * 128 // 2 + 14 + 2 * 4864 + 7 * 32)
    assert passing.adapter == adapter
    assert passing.kept(1024) == kept
    assert passing.peak(1024, MUCH) == GAPS * kept + LOGITS_CHUNKS * LOGITS_BYTES + 4 * adapter
    few = passing.peak(1024, MUCH, trained=100)
    assert few == GAPS * kept + max(3 * 4 * 100 * 151_936, IN_PIECES_WIDTHS * 4 * 1024 * 4864) + 4 * adapter
    assert passing.peak(1, MUCH) == STEP_BUFFERS * adapter, "the step of the optimizer"


def test_layers_are_computed_again_where_they_would_keep_more_than_half_of_the_free_memory() -> None:
    passing = _passing()
    free = passing.kept(2048) / SHARE
    rest = LOGITS_CHUNKS * LOGITS_BYTES + 4 * passing.adapter
    assert passing.peak(2048, free) == GAPS * passing.kept(2048) + rest
    inputs, one_layer = 4 * 2048 * 24 * 896, passing.kept(2048) / 24
    assert passing.peak(2048, 0.99 * free) == pytest.approx(GAPS * (inputs + one_layer) + rest)
    assert passing.recomputed(2 * LARGE_ROWS) < passing.peak(2 * LARGE_ROWS, free) - rest + 1


def test_the_worst_pass_is_the_largest_micro_batch_or_the_largest_that_keeps_its_layers() -> None:
    passing = _passing()
    assert passing.worst(MUCH) == (passing.peak(4096, MUCH), "in a micro-batch of 4,096 rows")
    free = passing.kept(1000) / SHARE
    size, why = passing.worst(free)
    assert size == passing.peak(1000, free) > passing.peak(4096, free)
    assert why == "in a micro-batch of 1,000 rows: larger ones have their layers computed again"
    size, why = _passing(longest=100_000).worst(free)
    assert size == passing.peak(100_000, free)
    assert why == "in a micro-batch of 100,000 rows, whose layers are computed again"


@pytest.mark.parametrize("other", [{"num_experts": 8}, {"mamba_num_heads": 4}, {"kv_lora_rank": 512}])
def test_passes_of_other_layers_are_not_estimated(other: dict[str, Any]) -> None:
    assert Widths.of(QWEN | other) is None
    assert Widths.of({name: value for name, value in QWEN.items() if name != "hidden_size"}) is None
