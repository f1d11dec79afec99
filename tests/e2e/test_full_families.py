"""A server for full fine-tuning of mixtures of experts and of models that see: every weight of the text part that the
unmodified SDK trains reaches the real vLLM, and so does what is only copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
import torch
from inference.test_families_vllm import MODELS
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny import model_path, moe
from skyrl.cli.demo.server import DemoServer
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
