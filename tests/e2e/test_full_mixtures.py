"""A server for full fine-tuning of a mixture of experts: every expert and router that the unmodified SDK trains reaches
the real vLLM.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny import moe
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

from .conftest import cross_entropy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The old fox watches the river at dawn."
STEP = types.AdamParams(learning_rate=1e-3)
LARGEST_GAP = 1e-4
"""Nats. Trainer and sampler compute in float32 with different kernels."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sampler_has_all_that_was_trained(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, ranks: int) -> None:
    moe.make(tmp_path / "model")
    flags = ("--base-model", str(tmp_path / "model"), "--served-model-name", "mixture")
    config = {"trainer.full_finetuning": True, "trainer.placement.policy_num_cpu_ranks": ranks}
    server = DemoServer(tmp_path / "server", *flags, backend_config=config)
    tokens = tokenizer.encode(TEXT)
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key="tml-full-mixture") as client:
        trainer = client.create_lora_training_client(base_model="mixture", rank=0).result()
        found = []
        for _ in range(2):
            trainer.forward_backward([cross_entropy(tokens)], "cross_entropy").result()
            trainer.optim_step(STEP).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
            output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]
            assert np.abs(sampled - output["logprobs"].to_numpy()).max() < LARGEST_GAP
            found.append(sampled)
        assert np.abs(found[1] - found[0]).max() > 100 * LARGEST_GAP
