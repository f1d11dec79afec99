"""An unchanged script on a mixture of experts: its adapters train experts, and real vLLM samples from them.

The tests share one server and run in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl.base.tiny import moe
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

from .conftest import cross_entropy
from .test_checkpoints import archive_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KEY = "tml-experts"
TEXTS = {
    "first": "The old fox watches the river at dawn, and a small boat goes down to the sea.",
    "second": "Every evening the teacher counts her books, and one of them is always missing.",
    "alone": "Two farmers carry the apples to the market, where nobody has seen the sun for days.",
    "attention": "In winter the train is late, so the doctor reads the letter a second time.",
}
LORA: dict[str, dict[str, Any]] = {
    "first": {"rank": 8},
    "second": {"rank": 32},
    "alone": {"rank": 4, "train_attn": False, "train_unembed": False},
    "attention": {"rank": 8, "train_mlp": False},
}
"""Two tenants with the SDK's defaults but the rank, one that trains experts alone, one that trains none."""
LARGEST_GAP = 1e-4
"""Nats. Trainer and sampler compute in float32 with different kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("mixture")
    moe.make(directory)
    return str(directory)


@pytest.fixture(scope="module")
def mixture(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    running = DemoServer(tmp_path_factory.mktemp("server"), "--base-model", model, "--served-model-name", "mixture")
    with ready(running):
        yield running


@pytest.fixture(scope="module")
def client(mixture: DemoServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=mixture.url, api_key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    return {name: tokenizer.encode(text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def trainers(client: tinker.ServiceClient, tokens: dict[str, list[int]]) -> dict[str, tinker.TrainingClient]:
    """Each trained on its own text."""
    made = {}
    for name, lora in LORA.items():
        trainer = client.create_lora_training_client(base_model="mixture", **lora).result()
        losses = []
        for _ in range(4):
            passed = trainer.forward_backward([cross_entropy(tokens[name])], "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
        assert losses[3] < losses[1] < losses[0]
        made[name] = trainer
    return made


@pytest.fixture(scope="module")
def samplers(trainers: dict[str, tinker.TrainingClient]) -> dict[str, tinker.SamplingClient]:
    return {name: trainer.save_weights_and_get_sampling_client().result() for name, trainer in trainers.items()}


def _trained(trainer: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    """The trainer's logprobs of tokens[1:]."""
    output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_numpy().astype(np.float64)


def _scored(sampler: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    return np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)


def test_the_sampler_has_the_trainers_logprobs(
    trainers: dict[str, tinker.TrainingClient], samplers: dict[str, tinker.SamplingClient], tokens: dict[str, list[int]]
) -> None:
    for name, trainer in trainers.items():
        for text in tokens.values():
            gap = np.abs(_scored(samplers[name], text) - _trained(trainer, text)).max()
            print(f"adapter {name}: largest gap {gap:.2g}")
            assert gap < LARGEST_GAP


def test_samples_of_adapters_and_of_the_base_model_in_one_batch_keep_their_weights(
    client: tinker.ServiceClient,
    trainers: dict[str, tinker.TrainingClient],
    samplers: dict[str, tinker.SamplingClient],
    tokens: dict[str, list[int]],
    model: str,
) -> None:
    base = client.create_sampling_client(base_model="mixture").result()
    params = types.SamplingParams(max_tokens=24, temperature=1.0, stop=[], seed=3)
    prompt = tokens["first"][:9]
    asked = {
        name: sampler.sample(types.ModelInput.from_ints(prompt), 3, params)
        for name, sampler in {**samplers, "base": base}.items()
    }
    stock: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, future in asked.items():
        for sequence in future.result().sequences:
            all_tokens = [*prompt, *sequence.tokens]
            expected = _logprobs(stock, all_tokens) if name == "base" else _trained(trainers[name], all_tokens)
            assert sequence.logprobs is not None
            assert np.abs(np.asarray(sequence.logprobs) - expected[len(prompt) - 1 :]).max() < LARGEST_GAP


def _logprobs(model: Any, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1]).logits[0].float().log_softmax(-1)
    return logits.gather(1, ids[1:, None])[:, 0].double().numpy()


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_the_checkpoint_gives_the_same_logprobs_in_peft_and_others_without_its_experts(
    mixture: DemoServer,
    trainers: dict[str, tinker.TrainingClient],
    samplers: dict[str, tinker.SamplingClient],
    tokens: dict[str, list[int]],
    model: str,
    tmp_path: Path,
) -> None:
    path = trainers["first"].save_weights_for_sampler("adapter").result().path
    archive = archive_of(mixture, path, tmp_path, KEY)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, str(archive))
    found = _scored(samplers["first"], tokens["first"])
    np.testing.assert_allclose(found, _logprobs(adapted, tokens["first"]), atol=LARGEST_GAP)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".experts." in name and ".lora_B." in name:
                parameter.zero_()
    gap = np.abs(found - _logprobs(adapted, tokens["first"]))
    print(f"without the adapter's experts: gap {gap.mean():.2g} on average, {gap.max():.2g} at most")
    assert gap.mean() > 0.05
