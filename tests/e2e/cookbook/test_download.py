"""The cookbook downloads a checkpoint, which is encrypted on the way, and merges it into the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt

from ..conftest import ALIAS, ClientFactory
from .conftest import Stored
from .workspace import KEY, Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

DOWNLOAD = """
import sys
from tinker_cookbook import weights

checkpoint, model, out = sys.argv[1:]
adapter = weights.download(tinker_path=checkpoint, output_dir=f"{out}/adapter")
weights.build_hf_model(
    base_model=model, adapter_path=adapter, output_path=f"{out}/merged", merge_strategy="full", dtype="float32"
)
weights.build_lora_adapter(base_model=model, adapter_path=adapter, output_path=f"{out}/peft")
"""


@pytest.fixture(scope="module")
def downloaded(workspace: Workspace, rolling: Run) -> Path:
    """The final checkpoint, downloaded, merged (`merged`) and converted (`peft`) by the cookbook."""
    out = workspace.root / "downloaded"
    workspace.script(DOWNLOAD, rolling.checkpoints[-1]["state_path"], ALIAS, str(out))
    return out


def test_the_files_arrive_decrypted_and_the_export_is_deleted(downloaded: Path, stored: Stored) -> None:
    names = {file.name for file in (downloaded / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not [name for name in names if name.endswith(".age")]
    config = json.loads((downloaded / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 32)
    # The cookbook's conversion has no names to change: the names are already those of PEFT and vLLM.
    converted = load_file(downloaded / "peft" / "adapter_model.safetensors")
    assert load_file(downloaded / "adapter" / "adapter_model.safetensors").keys() == converted.keys()
    assert not [kept for kept in stored.everything() if "/external_weights/" in kept.tinker_path]


def test_the_merged_model_gives_the_servers_logprobs(
    downloaded: Path, rolling: Run, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens = tokenizer.encode(chat_prompt("Where is the fox?") + "The old fox watches the mill.")
    sampler = connect(KEY).create_sampling_client(model_path=rolling.checkpoints[-1]["sampler_path"]).result()
    served = torch.tensor(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:])
    own = logprobs(downloaded / "merged", tokens)
    assert torch.allclose(own, served, atol=1e-3)
    assert not torch.allclose(logprobs(downloaded.parent / ALIAS, tokens), served, atol=1.0)


def logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first, as stock transformers computes it in float32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        scores = network(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
