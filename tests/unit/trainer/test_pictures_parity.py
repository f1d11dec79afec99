"""Sequences with pictures against transformers' own full model, and PEFT on it, for every family that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from picture_support import SEEING_FAMILIES, Picture, Sequences, logprobs_of, mixed, of_transformers, text
from torch_lora_support import assert_close, ok, saved, spec
from transformers import AutoConfig

from skyrl.base.config.loading import load_config
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import AdamParams
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows.packing import positions_of
from skyrl.trainer.vision import Seen
from tests.families import make_family

LOGPROB_BOUND = 2e-5
GRADIENT_BOUND = {"qwen3.5 that sees": 5e-5, "qwen3.5-moe that sees": 5e-5}
"""As in test_torch_lora_families."""


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_logprobs_and_gradients_equal_transformers_and_peft(tmp_path: Path, family: str) -> None:
    path = make_family(family, tmp_path)
    backend = LoraBackend(load_config({"base_model": path}))
    backend.create_model("m", spec(4, 11, train_mlp=backend.limits.mixture is None))  # PEFT names experts otherwise
    sequences = mixed()
    ok(backend.run([sequences.to("m")]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))  # so that lora_B is not 0
    (tmp_path / "adapter").mkdir()
    backend.save_adapter("m", tmp_path / "adapter")
    stock: Any = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path, attn_implementation="eager")
    model = PeftModel.from_pretrained(stock.eval(), str(tmp_path / "adapter"), is_trainable=True).eval()

    (result,) = ok(backend.run([sequences.to("m")]))
    loss, largest = torch.zeros(()), 0.0
    for datum, logprobs in zip(sequences.data, result.logprobs, strict=True):
        expected = logprobs_of(model, path, datum, sequences.files)
        np.testing.assert_allclose(logprobs, expected.detach(), atol=LOGPROB_BOUND)
        largest = max(largest, float(np.abs(logprobs - expected.detach().numpy()).max()))
        loss = loss - (torch.from_numpy(datum.loss_inputs["weights"]) * expected).sum()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    theirs = {
        "gradient." + name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert not any("visual" in name for name in theirs)
    ours = {name: each for name, each in saved(backend, "m", tmp_path / "state").items() if name in theirs}
    assert_close(ours, theirs, GRADIENT_BOUND.get(family, 1e-5))
    assert all(bool(tensor.any()) for tensor in ours.values())
    print(f"{family}: largest difference of a logprob {largest:.0e}")


@pytest.mark.parametrize("family", SEEING_FAMILIES[:2])
def test_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = make_family(family, tmp_path)
    model: Any = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    sequences = mixed()
    for datum in sequences.data:
        inputs = of_transformers(path, datum, sequences.files)
        grids = inputs.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        seen = {
            picture.digest: Seen((grid[1] // 2, grid[2] // 2), torch.zeros(picture.tokens, 1))
            for picture, grid in zip(datum.pictures, grids.tolist(), strict=True)
        }
        types = inputs.get("mm_token_type_ids", torch.zeros_like(inputs["input_ids"], dtype=torch.int32))
        expected, _ = model.model.get_rope_index(inputs["input_ids"], types, grids)
        np.testing.assert_array_equal(positions_of(datum, seen), expected[:, 0])


def test_a_picture_right_behind_another_begins_after_its_longer_side() -> None:
    """transformers takes both for one picture; vLLM counts as here."""
    a, b = Picture.drawn(1, 2, 3), Picture.drawn(2, 1, 2)
    datum = Sequences().add(text(1, 2), a, b, text(2, 2))
    seen = {each.digest: Seen((each.rows, each.columns), torch.zeros(each.tokens, 1)) for each in (a, b)}
    assert positions_of(datum, seen).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 5, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 5, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
