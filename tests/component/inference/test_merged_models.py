"""What `skyrl adapter` writes of a base model that ties lm_head to its embeddings, in a vLLM without skyrl's plugin:
the merged model is right, the whole adapter is refused, and the one without lm_head is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch_lora_support import make_backend, ok, sft, spec, train
from transformers import AutoModelForCausalLM

from skyrl.trainer.protocol import AdamParams, TrainingPass
from tests.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

STOCK = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

model, tokens, adapters = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
lora = {"enable_lora": True, "max_lora_rank": 8} if adapters else {}
llm = LLM(
    model=model, dtype="float32", enforce_eager=True, max_model_len=128, distributed_executor_backend="uni",
    skip_tokenizer_init=True, **lora
)

def logprobs(request):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rows = llm.generate(TokensPrompt(prompt_token_ids=tokens), params, lora_request=request)[0].prompt_logprobs
    return [row[token].logprob for row, token in zip(rows[1:], tokens[1:])]

answers = []
for number, adapter in enumerate(adapters, 1):
    request = LoRARequest(f"adapter-{number}", number, adapter)
    try:
        llm.llm_engine.add_lora(request)
        answers.append(logprobs(request))
    except ValueError as error:
        answers.append(str(error))
print(json.dumps(answers or [logprobs(None)]))
"""


def stock_vllm(model: Path | str, tokens: list[int], *adapters: Path) -> list[Any]:
    """Logprobs of the tokens but the first, with each adapter, or why vLLM refuses it; without adapters the model's."""
    stock = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    stock |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    command = [sys.executable, "-c", STOCK, str(model), json.dumps(tokens), *map(str, adapters)]
    stock |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, env=os.environ | stock, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def skyrl_adapter(*arguments: object) -> str:
    command = [sys.executable, "-m", "skyrl.cli.main", "adapter", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_a_tied_models_adapter_goes_to_a_vllm_without_skyrl(tmp_path: Path) -> None:
    base, adapter = make_family("qwen2", tmp_path), tmp_path / "adapter"
    backend = make_backend(path=base)
    backend.create_model("m", spec(8, 5))
    for step in range(2):
        ok(backend.run([train("m", sft(step, 30, 17))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    adapter.mkdir()
    backend.save_adapter("m", adapter)
    (datum,) = sft(8, 25)
    tokens = [*datum.tokens.tolist(), int(datum.loss_inputs["target_tokens"][-1])]
    (result,) = ok(backend.run([TrainingPass("m", [datum], "cross_entropy", backward=False)]))
    trained = result.logprobs[0]

    assert "tie_word_embeddings is false" in skyrl_adapter("merge", base, adapter, tmp_path / "merged")
    (merged,) = stock_vllm(tmp_path / "merged", tokens)
    np.testing.assert_allclose(merged, trained, atol=1e-4)
    stock = AutoModelForCausalLM.from_pretrained(base)
    assert np.abs(logprobs_of(stock, tokens).numpy() - trained).max() > 0.01, "the adapter changes nothing"

    assert "Left out: its update of lm_head" in skyrl_adapter("without-lm-head", adapter, tmp_path / "left")
    refused, left = stock_vllm(base, tokens, adapter, tmp_path / "left")
    assert "lm_head" in refused
    right = logprobs_of(PeftModel.from_pretrained(stock, str(tmp_path / "left")), tokens)
    np.testing.assert_allclose(left, right, atol=1e-4)
    assert np.abs(right.numpy() - trained).max() > 0.01, "what was left out is missing"
