"""A server for a quantized release: the trainer computes the weights, vLLM serves the release with its own kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer
from tests.families import make_family
from tests.quantized import INT4, int4, quantize
from tests.servers import ready

from .conftest import check_two_steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The old fox watches the river at dawn."
STEP = types.AdamParams(learning_rate=1e-2)
LARGEST_GAP = 0.2
"""Nats. vLLM's kernel of INT4 computes in bfloat16, the trainer in float32."""
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


def test_an_adapter_on_an_int4_release_trains_and_samples(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = Path(make_family("qwen3", tmp_path, **SIZES))
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / each, path / each)
    release = quantize(path, tmp_path / "release", INT4, int4())
    tokens = tokenizer.encode(TEXT)
    server = DemoServer(tmp_path / "server", "--base-model", release, "--served-model-name", "model")
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key="tml-quantized") as client:
        trainer = client.create_lora_training_client(base_model="model", rank=8).result()
        check_two_steps(trainer, tokens, STEP, LARGEST_GAP)
