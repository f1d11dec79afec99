"""benchmarks.real_memory: what it measures of a process, and what it predicts for a case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real_memory import ANSWER, ANSWERS, MIB, PROMPT, SCORED, SEQUENCES, Measured, Prediction, measure, table
from skyrl.base.config.loading import load_config
from skyrl.cli.launcher.memory_estimate import Size, need_of

SIZES = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


def test_the_peak_of_a_case_counts_and_not_what_was_before_or_after() -> None:
    def case() -> None:
        assert sum(bytearray(b"x" * 80 * MIB)[::4096])

    pids = {"vLLM": [], "trainer": [os.getpid()]}
    case()
    before, peak, after = measure(pids, case)["trainer"]
    assert 75 * MIB < peak - before < 250 * MIB
    assert after - before < 20 * MIB
    assert measure(pids, case)["vLLM"] == (0, 0, 0)
    _, peak, _ = measure(pids, lambda: None)["trainer"]
    assert peak - before < 20 * MIB


def test_a_prediction_has_what_the_case_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    keys = {"generator.inference_engine.max_model_len": 4096}
    need = need_of(load_config({"base_model": str(tmp_path), "backend_config": keys}), Size(134_500_000, 269_000_000))
    passing = need.passing
    assert passing is not None
    prediction = Prediction(need, passing)
    client: Any = SimpleNamespace(versions=2, computed=100)
    free = 1e12

    def at_peak(case: str, group: str) -> float | None:
        return prediction.at_peak(case, group, client, free)

    rows, trained = ANSWERS * ANSWER + ANSWERS // 8 * PROMPT, ANSWERS * ANSWER
    assert at_peak("rl", "trainer") == need.trainer + passing.peak(rows, free, trained=trained)
    assert at_peak("sft-batch", "trainer") == need.trainer + passing.peak(passing.rows, free)
    assert at_peak("sft-long", "trainer") == need.trainer + passing.peak(4096, free)
    assert at_peak("sample", "trainer") is at_peak("sft-long", "vLLM") is None
    loaded = need.vllms + 4 * passing.adapter
    computing = need.use.computing(SEQUENCES * 32, SEQUENCES)
    assert at_peak("sample", "vLLM") == pytest.approx(loaded + 100 * need.use.token + computing)
    client.computed = 10**9
    assert at_peak("scores", "vLLM") == pytest.approx(loaded + need.use.cache + need.use.scoring(SCORED))
    assert (prediction.at_rest("vLLM"), prediction.at_rest("trainer")) == (need.vllms, need.trainer)


def test_the_table_has_the_ratio_of_both() -> None:
    line = table([Measured("rl", "trainer", 1e9, 4e9, 2e9, 3e9)]).splitlines()[1]
    assert line.split() == ["rl", "trainer", "3", "4", "0.75", "1", "2"]
