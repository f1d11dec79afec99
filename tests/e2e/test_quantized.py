"""A server for a model that `skyrl quantize` has made: the trainer keeps its weights in 4 bits, vLLM serves the same
files with its own kernel, and the metric of the gap between both counts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer
from tests.families import make_family
from tests.servers import ready

from .conftest import check_two_steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The old fox watches the river at dawn."
STEP = types.AdamParams(learning_rate=1e-2)
LARGEST_GAP = 0.2
"""Nats. vLLM's kernel of INT4 computes in bfloat16, the trainer in float32."""
GAPS = re.compile(r"^skyrl_logprob_gap_nats_count(?:\{[^}]*\})? ([1-9]\S*)$", re.MULTILINE)
"""How many passes with a gap `/metrics` counts, unless that is 0."""
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


def test_an_adapter_on_a_model_quantized_here_trains_and_samples(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = Path(make_family("qwen3", tmp_path, **SIZES))
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / each, path / each)
    release = str(tmp_path / "release")
    command = [sys.executable, "-m", "skyrl.cli.main", "quantize", str(path), release, "--group-size", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith(f"{release}: 14 matrices in 4 bits"), "seven of two layers"
    tokens = tokenizer.encode(TEXT)
    backend = ("--backend-config", '{"trainer.keep_quantized": true}')
    server = DemoServer(tmp_path / "server", "--base-model", release, "--served-model-name", "model", *backend)
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key="tml-quantized") as client:
        trainer = client.create_lora_training_client(base_model="model", rank=8).result()
        check_two_steps(trainer, tokens, STEP, LARGEST_GAP)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
        inputs = {
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "logprobs": np.asarray(sampled, np.float32),
            "advantages": np.ones(len(sampled), np.float32),
        }
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
        )
        gap = trainer.forward_backward([datum], "importance_sampling").result().metrics["kl:mean"]
        assert abs(gap) < LARGEST_GAP / 2
        deadline = time.monotonic() + 30
        while not (counted := GAPS.findall(httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text)):
            assert time.monotonic() < deadline, "the engine's metrics come some seconds later"
            time.sleep(0.5)
        assert counted == ["1.0"]
