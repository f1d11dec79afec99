"""Families that a server trains as a whole or quantized: the sampler has all that was trained."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from inference.test_families_vllm import MODELS
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny import model_path, moe
from skyrl.cli.demo.server import DemoServer, ServerFailed
from tests.families import make_family
from tests.servers import ready

from .conftest import check_two_steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The old fox watches the river at dawn."
STEP = types.AdamParams(learning_rate=1e-3)
FLOAT32, BFLOAT16 = 1e-4, 0.1
"""The largest difference between a logprob of trainer and sampler, in nats: kernels differ, or vLLM's dtype does."""


def _mixture(directory: Path) -> Path:
    moe.make(directory / "model")
    return directory / "model"


def _family(name: str) -> Callable[[Path], Path]:
    """A maker of the family's tiny model, with layers that predict further tokens, as its releases have them."""

    def make(directory: Path) -> Path:
        family, changed = MODELS[name]
        path = Path(make_family(family, directory, **{**changed, "vocab_size": 512}))
        file = path / "model.safetensors"
        save_file(load_file(file) | {"mtp.norm.weight": torch.ones(8)}, file, metadata={"format": "pt"})
        for each in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(model_path() / each, path / each)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "ranks", "largest_gap"),
    [
        pytest.param(_mixture, 1, FLOAT32, id="mixture"),
        pytest.param(_mixture, 2, FLOAT32, id="mixture on two ranks"),
        pytest.param(_family("qwen3.5 that sees"), 1, BFLOAT16, id="qwen3.5 that sees"),
        pytest.param(_family("qwen3.5 that sees"), 2, BFLOAT16, id="qwen3.5 that sees, on two ranks"),
    ],
)
def test_the_sampler_has_all_that_was_trained(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    make: Callable[[Path], Path],
    ranks: int,
    largest_gap: float,
) -> None:
    path = make(tmp_path)
    flags = ("--base-model", str(path), "--served-model-name", "model")
    # The tokenizer of `_family` has no tokens for pictures.
    text_only = {"language_model_only": True} if (path / "preprocessor_config.json").is_file() else {}
    config = {
        "trainer.full_finetuning": True,
        "trainer.placement.policy_num_cpu_ranks": ranks,
        "generator.inference_engine.engine_init_kwargs": text_only,
    }
    server = DemoServer(tmp_path / "server", *flags, backend_config=config)
    tokens = tokenizer.encode(TEXT)
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key="tml-full-family") as client:
        trainer = client.create_lora_training_client(base_model="model", rank=0).result()
        check_two_steps(trainer, tokens, STEP, largest_gap)


SMALL_STEP = types.AdamParams(learning_rate=1e-2)
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
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        with pytest.raises(ServerFailed, match="only on a GPU or on a CPU with AVX-512"), ready(server):
            pass
        pytest.skip("this CPU has no AVX-512: that the server says so is checked, the rest needs one that has it")
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key="tml-quantized") as client:
        trainer = client.create_lora_training_client(base_model="model", rank=8).result()
        check_two_steps(trainer, tokens, SMALL_STEP, LARGEST_GAP)
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
        deadline = time.monotonic() + 300
        while not (counted := GAPS.findall(httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text)):
            assert time.monotonic() < deadline, "the engine's metrics come some seconds later"
            time.sleep(0.5)
        assert counted == ["1.0"]
