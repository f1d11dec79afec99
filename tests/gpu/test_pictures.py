"""Pictures against transformers and PEFT: equal in float32; in bfloat16 as close to float32 as PEFT is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from picture_support import Picture, group, logprobs_of, mixed
from torch import Tensor
from transformers import AutoConfig

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import AdamParams
from tests.families import make_family
from tests.gpu.figures import FIGURES
from tests.gpu.support import DEVICE, backend_on, distance, flat, gradient_of, ok
from tests.gpu.test_numerics import SLACK
from tests.local_ranks import rank_of

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
RANGE = 0.06
"""Of random weights, as in NUMERICS: rounding to bfloat16 grows less in the layers."""


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5 that sees"])
def test_pictures_train_as_with_transformers_and_peft(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path, initializer_range=RANGE)
    sequences = mixed()
    start = backend_on(path, dtype=FLOAT32)
    start.create_model("m", LoraSpec(4, 32.0, 3))
    ok(start.run([sequences.to("m")]))
    start.optim_step("m", AdamParams(learning_rate=2e-3, eps=1e-8))  # so that lora_B is not 0
    (tmp_path / "start").mkdir()
    start.save_state("m", tmp_path / "start")

    logprobs: dict[str, Tensor] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for dtype in (FLOAT32, BFLOAT16):
        loaded: Any = model_class(AutoConfig.from_pretrained(path)).from_pretrained(
            path, dtype=dtype, attn_implementation="eager"
        )
        model: Any = PeftModel.from_pretrained(loaded.to(DEVICE), str(tmp_path / "start"), is_trainable=True).eval()
        found = [logprobs_of(model, path, datum, sequences.files) for datum in sequences.data]
        weights = [torch.from_numpy(datum.loss_inputs["weights"]).to(DEVICE) for datum in sequences.data]
        sum(-(weight * each).sum() for weight, each in zip(weights, found, strict=True)).backward()  # type: ignore
        gradients[f"peft {dtype}"] = {
            name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): value.grad.cpu()
            for name, value in model.named_parameters()
            if value.grad is not None
        }
        logprobs[f"peft {dtype}"] = torch.cat(found).detach().cpu()
        backend = backend_on(path, dtype=dtype)
        backend.create_model("m", LoraSpec(4, 32.0, 3))
        backend.load_state("m", tmp_path / "start", optimizer=False)
        (result,) = ok(backend.run([sequences.to("m")]))
        logprobs[f"ours {dtype}"] = flat(result)
        gradients[f"ours {dtype}"] = gradient_of(backend, "m", tmp_path / str(dtype))
    exact = f"peft {FLOAT32}"
    torch.testing.assert_close(logprobs[f"ours {FLOAT32}"], logprobs[exact], atol=1e-3, rtol=0)
    assert distance(gradients[f"ours {FLOAT32}"], gradients[exact]) < 1e-3
    ours, peft = (distance(gradients[f"{who} {BFLOAT16}"], gradients[exact]) for who in ("ours", "peft"))
    FIGURES.record(f"pictures, {family}: gradient's distance from float32", peft, "beside")
    FIGURES.record(f"pictures, {family}: gradient's distance from float32", ours)
    assert ours < SLACK * peft


def test_a_group_about_one_picture_computes_it_once_on_the_device(tmp_path: Path) -> None:
    backend = backend_on(make_family("qwen3-vl", tmp_path, initializer_range=RANGE), merge=True)
    tower: Any = rank_of(backend).base.tower
    calls: list[torch.device] = []
    tower.module.register_forward_hook(lambda module, args, output: calls.append(output.pooler_output.device))
    for model_id in ("a", "b"):
        backend.create_model(model_id, LoraSpec(4, 32.0, 3))
    sequences = group(Picture.drawn(1), 16)
    results = ok(backend.run([sequences.to(model_id, "ppo") for model_id in ("a", "b")]))
    assert [device.type for device in calls] == [DEVICE]
    for result in results:
        assert result.metrics["computed_tokens:sum"] < 0.4 * result.metrics["num_tokens:sum"]
