"""Each architecture of docs/reference/architectures.md in a real vLLM on a CPU: base model and trained adapters.

The adapters train what the SDK asks for by default, all layers, the unembedding too; one has other ranks in some, one
is on the unembedding alone. vLLM's logprobs of given tokens, and of tokens that it sampled, are compared with the
trainer's. One start of vLLM for each family: about 15 s.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file

from skyrl.base.adapter_files import kinds_of
from skyrl.base.config.loading import load_config
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.inference.placement import LocalPlacement, LocalServer
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.architectures.figures import record
from tests.families import FAMILIES, MIXTURES, VOCAB, as_dense, make_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "test-key"
BOUND = 1e-4
"""Of the difference between a logprob of vLLM and the trainer's."""
BOUNDS = {"nemotron-h": 5e-3}
"""vLLM's scan of Mamba-2 for CPUs rounds more."""
CALM, MEAN_OF_CALM, OF_THE_CHANGE = 0.2, 0.04, 0.1
"""Where vLLM serves bfloat16 alone, a router may take another expert than the trainer's, and a logprob differs by much.
Of nine tenths of the tokens it differs by less than the first number. The others bound the mean difference of these
tokens, and by how much of itself an adapter's change of their logprobs is smaller or larger than the trainer's."""
NEW_TOKENS = 8
TRAINED = ("m", "ranks", "unembed")
UNSERVED = {
    "kimi-linear": "vLLM has it for GPUs alone",
    "glm-5.3-flash": "as kimi-linear",
    "inkling": "as kimi-linear",
    "kimi-k2.5": "needs a processor, also for text, which only its releases have; its text part is DeepSeek-V3's",
    "nemotron-h that sees": "as kimi-k2.5; its text part is Nemotron-H's",
    "mistral-4": "vLLM has it in Mistral's own form of files alone",
    "mistral-4 that sees": "as mistral-4",
    "hunyuan-moe": "vLLM computes it by transformers' class, and takes no adapters on experts there",
}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_ENOUGH = {"index_topk": 64, "index_head_dim": 96}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_PARTIAL = {
    **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *MIXTURES) if family not in UNSERVED},
    # vLLM's kernels for CPUs take these sizes.
    "deepseek-v3": ("deepseek-v3", _LATENT),
    # vLLM has sparse attention for GPUs alone: among so many tokens it is dense (`SPARSE`).
    "deepseek-v3.2": ("deepseek-v3.2", {**_LATENT, **_ENOUGH}),
    "glm-5": ("glm-5", {**_LATENT, **_ENOUGH}),
    "glm-4.7-flash": ("glm-4.7-flash", _LATENT),
    # vLLM reads these settings, which released models have.
    "hunyuan-3": (
        "hunyuan-3",
        {"first_k_dense_replace": 1, "expert_hidden_dim": 48, "route_norm": True, "qk_norm": True},
    ),
    # vLLM reads the scale of queries by position from this setting alone.
    "ministral-3": ("ministral-3", {"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.5}}),
    # Released models have yarn with these settings.
    "deepseek-v3, yarn": (
        "deepseek-v3",
        {**_LATENT, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    # vLLM reads these settings.
    "lfm2": ("lfm2", {"conv_dim": 128, "block_dim": 128}),
    "lfm2-moe": ("lfm2-moe", {"conv_dim": 128, "tie_word_embeddings": True}),
    "minimax-m2": ("minimax-m2", {"scoring_func": "sigmoid", "use_routing_bias": True, "num_mtp_modules": 0}),
    "qwen3-vl-moe": ("qwen3-vl-moe", {"norm_topk_prob": True}),
    "qwen3.5 that sees": ("qwen3.5 that sees", {"rope_parameters": _PARTIAL}),
    "qwen3.5-moe that sees": ("qwen3.5-moe that sees", {"rope_parameters": _PARTIAL}),
    # It also has its own bound of the activation.
    "gpt-oss": (
        "gpt-oss",
        {"rope_parameters": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, "swiglu_limit": 7.0},
    ),
    # vLLM's window of Cohere2 is one token longer than transformers'. Within the window they agree.
    "command-a": ("command-a", {"sliding_window": 64}),
    # That of released models. vLLM's own bound for adapters on lm_head is lower.
    "gemma-3, large vocabulary": ("gemma-3", {"vocab_size": 262_208}),
}
"""Each family, and the settings of its tiny model that differ from `tests.families`."""
SPARSE = ("deepseek-v3.2", "glm-5")
"""vLLM serves these as DeepSeek-V3, of the same weights without indexers, and loads the trainer's adapters."""


def _trained(path: str, directory: Path) -> LoraBackend:
    """A backend with the untrained adapter "base" and the trained ones "m", "ranks", with another rank in each kind of
    layer, and "unembed", on lm_head alone. Exports of the trained ones are in `directory`."""
    backend = LoraBackend(load_config({"base_model": path}))
    plain = LoraSpec(rank=8, alpha=32.0, seed=3)
    backend.create_model("base", plain)
    ranks = zip(map(re.escape, kinds_of(backend.layers_of(plain))), cycle((2, 5, 16, 3, 9)), strict=False)
    specs = {
        "m": plain,
        "ranks": replace(plain, rank_pattern=tuple(ranks)),
        "unembed": replace(plain, train_attn=False, train_mlp=False),
    }
    for name, spec in specs.items():
        backend.create_model(name, spec)
        backend.run([TrainingPass(name, [_datum(1)], "cross_entropy")])
        backend.optim_step(name, AdamParams(learning_rate=1e-2))
        (directory / name).mkdir(parents=True)
        backend.save_adapter(name, directory / name)
    return backend


def _datum(seed: int, length: int = 40) -> Datum:
    text = np.random.default_rng(seed).integers(0, VOCAB, length)
    return Datum(text[:-1], {"target_tokens": text[1:], "weights": np.ones(length - 1, np.float32)})


Tokens = list[int]
Logprobs = npt.NDArray[np.float32]


def _of_trainer(backend: LoraBackend, name: str, tokens: Tokens) -> Logprobs:
    text = np.array(tokens)
    datum = Datum(text[:-1], {"target_tokens": text[1:], "weights": np.ones(len(tokens) - 1, np.float32)})
    (result,) = backend.run([TrainingPass(name, [datum], "cross_entropy", backward=False)])
    assert not isinstance(result, Exception), result
    return result.logprobs[0]


def _prompt() -> Tokens:
    datum = _datum(2)
    return [*datum.tokens.tolist(), int(datum.loss_inputs["target_tokens"][-1])]


async def _of_vllm(http: httpx.AsyncClient, name: str) -> tuple[Tokens, Logprobs]:
    """The prompt with what vLLM samples after it, and the logprobs of all tokens but the first."""
    body = {"model": name, "prompt": _prompt(), "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1}
    more = {"prompt_logprobs": 0, "logprobs": 0, "return_token_ids": True, "seed": 5}
    answer = await http.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    rows = zip(choice["prompt_logprobs"][1:], _prompt()[1:], strict=True)
    of_prompt = [row[str(token)]["logprob"] for row, token in rows]
    new = choice["token_ids"]
    assert len(new) == NEW_TOKENS
    return [*_prompt(), *new], np.array([*of_prompt, *choice["logprobs"]["token_logprobs"]], np.float32)


def as_released(family: str, path: Path) -> None:
    """Releases of Qwen3-VL have experts with rows and columns exchanged, and vLLM reads no others. transformers reads
    both, and saves them as its model has them."""
    if family != "qwen3-vl-moe":
        return
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("model", MODELS)
async def test_vllm_and_the_trainer_agree_on_base_model_and_adapters(tmp_path: Path, model: str) -> None:
    family, changed = MODELS[model]
    path = make_family(family, tmp_path, **changed)
    as_released(family, Path(path))
    backend = _trained(path, tmp_path / "adapters")
    if family in SPARSE:
        path = as_dense(path, tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, Path(path) / name)
    # The tokenizer above has no tokens for pictures. test_pictures_vllm.py has these models with pictures.
    options = {"generator.inference_engine.engine_init_kwargs": {"language_model_only": True} if _sees(path) else {}}
    config = load_config({"base_model": path, "backend_config": options})
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    dtype = spec.argv[spec.argv.index("--dtype") + 1]
    server = LocalPlacement(tmp_path).run(spec)
    try:
        async with httpx.AsyncClient(base_url=spec.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
            await _until_up(http, server)
            for name in TRAINED:
                loaded = await _load(http, name, tmp_path / "adapters" / name)
                assert loaded.status_code == 200, loaded.text
            served = {"base": config.served_names[0], **{name: name for name in TRAINED}}
            sampled = {name: await _of_vllm(http, at_vllm) for name, at_vllm in served.items()}
    finally:
        await server.stop()
    expected = {name: _of_trainer(backend, name, tokens) for name, (tokens, _) in sampled.items()}
    found = {name: logprobs for name, (_, logprobs) in sampled.items()}
    gaps = {name: float(np.abs(found[name] - expected[name]).max()) for name in found}
    print(f"{model}, {dtype}: largest gap of a logprob", *(f"{name} {gap:.1e}" for name, gap in gaps.items()))
    prompt = slice(len(_prompt()) - 1)
    for name in TRAINED:
        change = (expected[name] - expected["base"])[prompt]
        assert np.abs(change).max() > 0.01
        if dtype == "bfloat16":
            _check_change(change, (found[name] - found["base"])[prompt])
    if dtype == "float32":
        assert max(gaps.values()) <= BOUNDS.get(family, BOUND)
    else:
        for name in found:
            calm = _calm(found[name] - expected[name])
            assert np.abs((found[name] - expected[name])[calm]).mean() <= MEAN_OF_CALM
    del gaps["ranks"]
    means = {name: float(np.abs(found[name] - expected[name]).mean()) for name in gaps}
    record(model, vllm={"gaps": gaps, "means": means, "dtype": dtype})


def _sees(path: str) -> bool:
    try:
        VisionConfig.of(path)
    except NoVision:
        return False
    return True


def _calm(gap: Logprobs) -> npt.NDArray[np.bool_]:
    """Of which tokens the difference is small. Raises AssertionError if these are too few."""
    calm = np.abs(gap) < CALM
    assert calm.mean() >= 0.9, gap
    return calm


def _check_change(expected: Logprobs, found: Logprobs) -> None:
    """What the adapter adds to logprobs in the trainer, and in vLLM."""
    calm = _calm(found - expected)
    part = float(found[calm] @ expected[calm] / (expected[calm] @ expected[calm]))
    print(f"of {calm.mean():.0%} of the tokens, vLLM's change is {part:.3f} of the trainer's")
    assert abs(part - 1) <= OF_THE_CHANGE


async def _load(http: httpx.AsyncClient, name: str, directory: Path) -> httpx.Response:
    return await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory)})


async def _until_up(http: httpx.AsyncClient, server: LocalServer) -> None:
    starts: set[str] = set()
    end = time.monotonic() + 200
    while not await _is_up(http):
        starts |= {server.incarnation} if server.incarnation else set()
        assert time.monotonic() < end, server.log_tail(40)
        assert len(starts) <= 1, server.log_tail(80)  # it has ended, and was started again
        await asyncio.sleep(0.3)


async def _is_up(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
