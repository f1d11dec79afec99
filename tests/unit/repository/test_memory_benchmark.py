"""benchmarks.real_memory: what it measures of a process; and the estimate of before a start, held against what it has
measured of released models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.processes import MIB
from benchmarks.real_memory import Client, Prediction, measure
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.cli.launcher.memory_estimate import Size, need_of


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


RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "real-memory.json"
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny": (json.loads((model_path() / "config.json").read_text()), 648_320, 4096),
    "SmolLM2-135M-Instruct": (
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        }
        | {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49_152},
        134_515_008,
        4096,
    ),
    "Qwen2.5-Coder-0.5B-Instruct": (
        {"model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True},
        494_032_768,
        2048,
    ),
    "Gemma-3-270m": (
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        }
        | {"hidden_size": 640, "intermediate_size": 2048, "vocab_size": 262_144},
        268_098_176,
        4096,
    ),
}
"""What each release's config.json says, its parameters, and the rows of a micro-batch when it was measured."""
MOST_OFF = 0.15


@pytest.mark.parametrize("name", SHAPES)
def test_the_estimate_is_close_to_what_was_measured_of_a_release(name: str, tmp_path: Path) -> None:
    shape, parameters, rows = SHAPES[name]
    recorded = json.loads(RECORDED.read_text())[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    keys = {"generator.inference_engine.max_model_len": recorded["settings"]["context"]}
    keys |= {"trainer.micro_batch_tokens": rows}
    config = load_config({"base_model": str(tmp_path), "backend_config": keys})
    need = need_of(config, Size(parameters, 2 * parameters))
    assert need.passing is not None
    prediction, cases = Prediction(need, need.passing), set()
    for row in recorded["rows"]:
        loaded = cast(Client, SimpleNamespace(versions=row["versions"], computed=row["computed"]))
        if row["case"] == "ready":
            predicted = prediction.at_rest(row["group"])
        else:
            predicted = prediction.at_peak(row["case"], row["group"], loaded, row["free"])
        assert predicted == pytest.approx(row["peak"], rel=MOST_OFF), (row["case"], row["group"])
        cases.add((row["case"], row["group"]))
    assert {("ready", "vLLM"), ("ready", "trainer"), ("rl", "vLLM"), ("sft-batch", "trainer")} <= cases
