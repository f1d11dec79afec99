"""Every architecture of docs/reference/architectures.md against transformers (eager attention) and PEFT.

`pytest -s` shows the differences. `make tables NEW=architectures` keeps them for the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from picture_support import SEEING_FAMILIES, logprobs_of, mixed
from torch_lora_support import (
    assert_close,
    files_saved,
    make_full,
    ok,
    saved,
    sft,
    spec,
    stock_logprobs,
    stock_terms,
    train,
)
from trainer_kinds import WHOLE
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import AdamParams, Backend
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.architectures.facts import facts_of
from tests.architectures.figures import record
from tests.families import FAMILIES, OPT, make_family, save_random

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
LENGTHS = (7, 31, 1, 18)
LOGPROB_BOUND, GRADIENT_BOUND = 2e-5, 1e-5
CANCELLING: dict[str, float] = dict.fromkeys(
    ("qwen3.5", "qwen3.5 that sees", "qwen3.5-moe that sees", "gemma-4", "gemma-4 that sees"), 5e-5
)
"""Gradients of the delta rule's decays are small sums of large numbers: transformers' own, in float32, are 3e-5 away
from what it computes in float64. So are those of Gemma 4, whose scores of attention have no scale."""


@pytest.mark.parametrize(
    ("family", "sees"), [*((family, False) for family in FAMILIES), *((family, True) for family in SEEING_FAMILIES)]
)
def test_logprobs_and_gradients_equal_transformers_and_peft(tmp_path: Path, family: str, sees: bool) -> None:
    """Also with pictures, where a family `sees`."""
    path = make_family(family, tmp_path)
    backend = LoraBackend(load_config({"base_model": path}))
    backend.create_model("m", spec(4, 11, train_mlp=backend.limits.mixture is None))  # PEFT names experts otherwise
    ok(backend.run([mixed().to("m") if sees else train("m", sft(0, *LENGTHS))]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))  # so that lora_B is not 0
    (tmp_path / "adapter").mkdir()
    backend.save_adapter("m", tmp_path / "adapter")
    loader = model_class(AutoConfig.from_pretrained(path))
    stock = loader.from_pretrained(path, attn_implementation="eager").eval()
    model = PeftModel.from_pretrained(stock, str(tmp_path / "adapter"), is_trainable=True).eval()

    of_logprobs = _compare_a_pass(backend, model, path if sees else None)
    theirs = {
        "gradient." + name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert not any("visual" in name for name in theirs)
    stored = saved(backend, "m", tmp_path / "state")
    ours = {name: tensor for name, tensor in stored.items() if name.startswith("gradient.")}
    assert_close(ours, theirs, CANCELLING.get(family, GRADIENT_BOUND))
    assert all(bool(tensor.any()) for tensor in ours.values())
    of_gradients = max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)
    print(f"{family}: largest difference of a logprob {of_logprobs:.0e}, of a gradient {of_gradients:.0e}")
    if not sees:
        record(family, logprob=of_logprobs, gradient=of_gradients, **facts_of(backend))


def test_full_finetuning_of_learned_positions_equals_transformers(tmp_path: Path) -> None:
    """Adapters cannot train such a model, because of its projections."""
    path = save_random(OPT, tmp_path / "opt")
    backend = make_full(path=path)
    backend.create_model("m", WHOLE)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    _compare_a_pass(backend, model)
    stored = files_saved(backend, "m", tmp_path / "state")
    ours = {name: tensor for name, tensor in stored.items() if name.startswith("gradient.")}
    theirs = {f"gradient.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradients in (ours, theirs):  # a bias of all keys changes no softmax: its gradient is rounding
        for name in [name for name in gradients if name.endswith("k_proj.bias")]:
            del gradients[name]
    assert "gradient.model.decoder.embed_positions.weight" in ours
    assert_close(ours, theirs, GRADIENT_BOUND)


def _compare_a_pass(backend: Backend, model: Any, pictured: str | None = None) -> float:
    """Run the same pass on the backend's model "m" and on `model`, whose parameters get their gradients. `pictured`:
    the model's path, for a pass with pictures. Logprobs must agree. Returns the largest difference of one."""
    sequences = mixed()
    sent = train("m", sft(1, *LENGTHS)) if pictured is None else sequences.to("m")
    (result,) = ok(backend.run([sent]))
    loss, largest = torch.zeros(()), 0.0
    for datum, logprobs in zip(sent.data, result.logprobs, strict=True):
        if pictured is None:
            expected = stock_logprobs(model, datum)
        else:
            expected = logprobs_of(model, pictured, datum, sequences.files)
        np.testing.assert_allclose(logprobs, expected.detach(), atol=LOGPROB_BOUND)
        largest = max(largest, float(np.abs(logprobs - expected.detach().numpy()).max()))
        loss = loss + stock_terms(expected, datum).sum()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-4)
    loss.backward()
    return largest
