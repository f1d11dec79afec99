"""Routed experts of samples with adapters, from real vLLM on a CPU: adapters change what the routers see.

One adapter trains experts, one attention alone; samples of both and of the base model run in one batch. In float32 the
experts are those of PEFT's model; in bfloat16 the trainer's logprobs are nearer to the sampler's if it replays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import moe
from skyrl.base.types.weights import LoraSpec
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.component.inference.test_routed_experts import KEY, chosen_experts, prompt_of, rows_of
from tests.component.sidecar_world import RunningSidecar, running_sidecar

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTERS = {"experts": LoraSpec(8, 32.0, 1), "attention": LoraSpec(8, 32.0, 2, train_mlp=False)}
SAMPLES, NEW_TOKENS = 24, 48


@contextlib.asynccontextmanager
async def serving(
    model: Path, directory: Path, dtype: str, train_mlp_of_mixtures: str = "train"
) -> AsyncIterator[RunningSidecar]:
    options = {"enable_return_routed_experts": True, "dtype": dtype}
    settings = {
        "generator.inference_engine": {"max_model_len": 256, "engine_init_kwargs": options},
        "trainer.policy.model.lora.train_mlp_of_mixtures": train_mlp_of_mixtures,
    }
    config = load_config({"base_model": str(model), "backend_config": settings})
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    handle = LocalPlacement(directory).run(spec, [])
    try:
        async with running_sidecar(spec.url, vllm_api_key=KEY) as sidecar:
            end = time.monotonic() + 400
            while (await sidecar.post("/health_generate"))[0] != 200:
                assert time.monotonic() < end, handle.log_tail(60)
                await asyncio.sleep(0.1)
            yield sidecar
    finally:
        await handle.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    moe.make(directory)
    return directory


@pytest.fixture(scope="module")
def backend(model: Path) -> LoraBackend:
    """The trainer, with adapters after three steps on random tokens."""
    made = LoraBackend(load_config({"base_model": str(model)}))
    for name, spec in ADAPTERS.items():
        made.create_model(name, spec)
        for step in range(3):
            tokens = np.array(prompt_of(step, 65))
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(64, np.float32)}
            (result,) = made.run([TrainingPass(name, [Datum(tokens[:-1], inputs)], "cross_entropy")])
            assert not isinstance(result, Exception)
            made.optim_step(name, AdamParams(learning_rate=5e-3))
    return made


@pytest.fixture(scope="module")
def files(backend: LoraBackend, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ADAPTERS}
    for name, directory in found.items():
        backend.save_adapter(name, directory)
    return found


async def _sampled(sidecar: RunningSidecar, files: dict[str, Path]) -> dict[str, list[tuple[list[int], Any]]]:
    """By adapter, or `base`: prompts and answers. All run together."""
    for name in files:
        status, answer = await _load(sidecar, name, files)
        assert status == 200, answer
    params = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"return_routed_experts": True, "return_logprob": True}
    names = [name for name in (*files, "base") for _ in range(SAMPLES)]
    prompts = [prompt_of(number % SAMPLES, 12) for number in range(len(names))]
    answers = await asyncio.gather(
        *(
            sidecar.generate(
                input_ids=prompt,
                sampling_params=params | {"sampling_seed": seed},
                **body,
                **({} if name == "base" else {"lora_path": name}),
            )
            for seed, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        )
    )
    found: dict[str, list[tuple[list[int], Any]]] = {}
    for name, prompt, (status, answer) in zip(names, prompts, answers, strict=True):
        assert status == 200, answer
        found.setdefault(name, []).append((prompt, answer))
    return found


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
async def test_in_float32_the_experts_are_those_of_the_adapted_model(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(model, tmp_path, "float32") as sidecar:
        sampled = await _sampled(sidecar, files)
    for name, answers in sampled.items():
        computed: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if name != "base":
            computed = PeftModel.from_pretrained(computed, str(files[name])).eval()
        for prompt, answer in answers:
            tokens = [*prompt, *answer["output_ids"]]
            np.testing.assert_array_equal(rows_of(answer), chosen_experts(computed, tokens)[:-1], err_msg=name)


async def test_in_bfloat16_replay_brings_trained_adapters_closer_to_the_sampler(
    model: Path, backend: LoraBackend, files: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(model, tmp_path, "bfloat16") as sidecar:
        sampled = await _sampled(sidecar, files)
    for name in ADAPTERS:
        gaps = {}
        for way in ("free", "replayed"):
            data = []
            for prompt, answer in sampled[name]:
                tokens = np.array([*prompt, *answer["output_ids"]])
                inputs = {"target_tokens": tokens[1:]}
                if way == "replayed":
                    inputs["routed_experts"] = rows_of(answer).astype(np.int64)
                data.append(Datum(tokens[:-1], inputs))
            (result,) = backend.run([TrainingPass(name, data, "cross_entropy", backward=False)])
            assert not isinstance(result, Exception)
            gaps[way] = np.concatenate(
                [
                    logprobs[-NEW_TOKENS:] - [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
                    for logprobs, (_, answer) in zip(result.logprobs, sampled[name], strict=True)
                ]
            )
            print(f"{name}, {way}: mean {np.abs(gaps[way]).mean():.4f}, largest {np.abs(gaps[way]).max():.2f} nats")
        assert (gaps["replayed"] ** 2).mean() < (gaps["free"] ** 2).mean()
        assert np.abs(gaps["replayed"]).mean() < 0.03


async def test_without_room_for_experts_an_adapter_that_changes_them_is_refused(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(model, tmp_path, "float32", "refuse") as sidecar:
        status, answer = await _load(sidecar, "experts", files)
        assert status == 502
        assert "train_mlp_of_mixtures to train" in str(answer)
        status, answer = await _load(sidecar, "attention", files)
        assert status == 200, answer


async def _load(sidecar: RunningSidecar, name: str, files: dict[str, Path]) -> tuple[int, Any]:
    return await sidecar.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(files[name])})
