"""Sparse attention on a GPU: trainer and vLLM on a prompt with more tokens than an indexer chooses.

vLLM's indexer scores in fp8, so of tokens with nearly equal scores it chooses others, and no bound of rounding holds.
But its logprobs must be nearer to the trainer's than to those of dense attention. vLLM has sparse attention for GPUs
alone: the rehearsal compares the trainer with itself.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import cuda_devices, plugin_installed, vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from tests.gpu.figures import FIGURES
from tests.gpu.support import DEVICE, NEW_FAMILIES, REHEARSAL, backend_on, build, logprobs_of, ok
from tests.gpu.test_prompt_logprobs import KEY, _rms, _until_up

pytestmark = NEW_FAMILIES
TOPK, LENGTH = (2048, 3000) if not REHEARSAL else (64, 150)
"""vLLM's kernel chooses 2,048 tokens."""
BEYOND = slice((TOPK + LENGTH) // 2, None)
"""Of tokens with many more before them than are chosen."""
SETTINGS: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 64 if not REHEARSAL else 4,
    "num_key_value_heads": 64 if not REHEARSAL else 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "index_n_heads": 64 if not REHEARSAL else 8,
    "index_head_dim": 128,
    "index_topk": TOPK,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
Logprobs = npt.NDArray[np.float32]


def _datum(seed: int, length: int) -> Datum:
    text = np.random.default_rng(seed).integers(0, SETTINGS["vocab_size"], length)
    return Datum(text[:-1], {"target_tokens": text[1:], "weights": np.ones(length - 1, np.float32)})


def _served(family: str, directory: Path) -> str:
    """The directory of a random model, with a tokenizer."""
    path = Path(build(SETTINGS | {"model_type": family}, directory))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, path / name)
    return str(path)


def _dense(path: str, directory: Path) -> str:
    """The same weights, where an indexer would choose more tokens than there are."""
    shutil.copytree(path, directory)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | {"index_topk": 2**20}))
    return str(directory)


def _learn(path: str, state: Path, directory: Path | None, dtype: torch.dtype) -> dict[str, Logprobs]:
    """The logprobs of the base model and of an adapter, which is trained into `state`, and `directory`, or read."""
    backend = backend_on(path, dtype=dtype)
    for name in ("base", "m"):
        backend.create_model(name, LoraSpec(rank=8, alpha=32.0, seed=3))
    if directory is not None:
        ok(backend.run([TrainingPass("m", [_datum(1, LENGTH)], "cross_entropy")]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
        for made, save in ((state, backend.save_state), (directory, backend.save_adapter)):
            made.mkdir(parents=True)
            save("m", made)
    else:
        backend.load_state("m", state, optimizer=False)
    given = [_datum(2, LENGTH)]
    found = {
        name: ok(backend.run([TrainingPass(name, given, "cross_entropy", backward=False)]))[0] for name in ("base", "m")
    }
    return {name: result.logprobs[0] for name, result in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_agrees_with_transformers_beyond_the_chosen_tokens(bases: Path, family: str) -> None:
    path = _served(family, bases)
    backend = backend_on(path, dtype=torch.float32)
    backend.create_model("m", LoraSpec(rank=8, alpha=32.0, seed=3))
    (result,) = ok(backend.run([TrainingPass("m", [_datum(2, LENGTH)], "cross_entropy")]))
    loader = model_class(AutoConfig.from_pretrained(path))
    with torch.no_grad():
        model = loader.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(DEVICE).eval()
        expected = logprobs_of(model, _datum(2, LENGTH)).cpu().numpy()
    gap = _rms(result.logprobs[0] - expected)
    FIGURES.record(f"{family}, {LENGTH} tokens: distance of logprobs from transformers' in float32 (RMS)", gap)
    assert gap < 1e-2  # some of many thousands of nearly equal scores change places


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not REHEARSAL and (find_spec("vllm") is None or not plugin_installed()),
    reason="needs vLLM, and skyrl installed beside it (pip install -e . --no-deps)",
)
@pytest.mark.parametrize("family", FAMILIES)
async def test_vllm_is_nearer_to_the_trainers_sparse_attention_than_to_dense_one(
    bases: Path, tmp_path: Path, family: str
) -> None:
    """An adapter on all layers, too."""
    path, state, adapter = _served(family, bases), tmp_path / "state", tmp_path / "m"
    sparse = _learn(path, state, adapter, torch.bfloat16)
    dense = _learn(_dense(path, tmp_path / "dense"), state, None, torch.bfloat16)
    for name in sparse:
        assert _rms((sparse[name] - dense[name])[:TOPK]) < _rms((sparse[name] - dense[name])[BEYOND])
    if REHEARSAL:
        pytest.skip("vLLM has sparse attention for GPUs alone; until here the rehearsal went")
    settings = {
        "generator.inference_engine.gpu_memory_utilization": 0.3,
        "generator.inference_engine.max_model_len": 4096,
        "trainer.policy.model.lora": {"max_loras": 1, "max_lora_rank": 8},
    }
    config = load_config({"base_model": path, "state_dir": tmp_path / "skyrl", "backend_config": settings})
    spec = vllm_spec(config, free_port(), KEY, cuda=True)
    server = LocalPlacement(tmp_path).run(spec, cuda_devices()[:1])
    try:
        async with httpx.AsyncClient(
            base_url=spec.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300
        ) as http:
            await _until_up(http, server)
            body = {"lora_name": "m", "lora_path": str(adapter)}
            answer = await http.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == 200, answer.text
            served = {"base": config.served_names[0], "m": "m"}
            found = {name: await _prompt_logprobs(http, at_vllm) for name, at_vllm in served.items()}
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log_tail(60)}") from error
    finally:
        await server.stop()
    for name, logprobs in found.items():
        near, far = (_rms((logprobs - other[name])[BEYOND]) for other in (sparse, dense))
        FIGURES.record(f"{family}, {name}: distance of vLLM's logprobs from sparse attention's (RMS)", near)
        FIGURES.record(f"{family}, {name}: distance of vLLM's logprobs from dense attention's (RMS)", far)
        assert near < 0.7 * far


async def _prompt_logprobs(http: httpx.AsyncClient, model: str) -> Logprobs:
    datum = _datum(2, LENGTH)
    prompt = [*datum.tokens.tolist(), int(datum.loss_inputs["target_tokens"][-1])]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return np.array([row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)], np.float32)
