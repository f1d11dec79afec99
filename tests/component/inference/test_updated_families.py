"""Updates of mixtures of experts of all families that vLLM serves on a CPU: whole and in part, against a vLLM that is
started with the new weights; and the record of experts, against transformers' routers.

One process for each family, with three starts of vLLM: about 40 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.vllm_command import vllm_spec
from tests.families import MIXTURES

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

EXACT = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3", "glm-4.5", "minimax-m2")
ROUNDED = {"qwen3-next": "bfloat16", "qwen3.5-moe": "bfloat16", "nemotron-h": "float32"}
"""vLLM's delta rule on a CPU computes in bfloat16 alone, its Mamba layers partly."""
NOT_SERVED = {
    "kimi-linear": "vLLM on a CPU turns its prefix cache off, and then refuses the model",
    "deepseek-v3.2": "vLLM has sparse attention for GPUs alone",
    "glm-5": "as deepseek-v3.2",
    "glm-5.3-flash": "as deepseek-v3.2",
    "qwen3-vl-moe": "needs a processor; its text part is Qwen3-MoE's",
    "inkling": "vLLM has it for GPUs alone",
    "lfm2-moe": "vLLM reads sizes that transformers does not; test_families_vllm.py has them",
    "qwen3.5-moe that sees": "needs a processor; its text part is Qwen3.5-MoE's",
    "kimi-k2.5": "needs a processor; its text part is DeepSeek-V3's",
    "nemotron-h that sees": "needs a processor; its text part is Nemotron-H's",
}
BOUND = 1e-4
"""Nats, between vLLM's logprobs and transformers' in float32."""


def updated(family: str, dtype: str, directory: Path) -> dict[str, Any]:
    env = vllm_spec(load_config({"base_model": str(model_path())}), 1, "k", cuda=False).env
    done = subprocess.run(
        [sys.executable, "-m", "tests.component.updated_family", family, dtype, str(directory)],
        env=os.environ | env | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", [*EXACT, *ROUNDED])
def test_an_updated_model_is_the_one_that_is_started_with_the_new_weights(family: str, tmp_path: Path) -> None:
    found = updated(family, ROUNDED.get(family, "float32"), tmp_path)
    print(family, found)
    assert found["whole"] == [True, True], "logprobs and experts, checksums"
    assert found["partly"] == [True, True]
    assert found["read_wrong"] == 0
    assert min(found["moved"], found["moved_back"]) > 0.1
    if family in EXACT:
        assert found["off"] < BOUND
        assert found["rows"] == 1
    else:
        assert found["rows"] > 0.5, "rounding flips routers"


def test_every_mixture_is_tried_or_said_not_to_be_served() -> None:
    assert {*EXACT, *ROUNDED, *NOT_SERVED} == set(MIXTURES)
