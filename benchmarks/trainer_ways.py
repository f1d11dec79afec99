"""The ways in which `benchmarks.trainer` trains a batch: this server's backend, and plain loops over PEFT.

All have the same base model, targets, ranks, losses and optimizer, and lora_A from the same seed. `trainer_server.py`
is one more way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trainer_rows import TenantPass
from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.device import base_dtype, synchronize
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.model.packed_model import ATTENTION, MLP, UNEMBED
from skyrl.trainer.passes import pass_run
from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

STEP = AdamParams(learning_rate=1e-4, eps=1e-8)
ALPHA = 32.0
COMPUTED = "computed_tokens:sum"
BUDGET = 4096
"""Tokens of a micro-batch of every way."""
LOGITS_BYTES = 2**30
"""The PEFT loops hold all float32 logits of a micro-batch. So they bound a micro-batch by these bytes, too."""


@dataclass(frozen=True)
class Trained:
    """What a tenant's pass has given: its loss, and the logprobs of all targets, float32 [tokens]. `rows`: how many
    went through the model, a shared prefix once, padding too."""

    loss: float
    logprobs: np.ndarray
    rows: float


class Way(Protocol):
    def start(self, passes: Sequence[TenantPass]) -> None:
        """Make an adapter for each pass, and take the passes."""
        ...

    def take(self, passes: Sequence[TenantPass]) -> None:
        """Later steps train these."""
        ...

    def step(self) -> list[Trained]:
        """One pass and one optimizer step of each tenant, from arrays to results."""
        ...

    def pids(self) -> list[int]:
        """The processes that work for it besides this one."""
        ...

    def close(self) -> None: ...


def spec(rank: int, number: int) -> LoraSpec:
    return LoraSpec(rank, ALPHA, seed=number)


class SkyrlWay:
    """The backend without a server. Passes run one after the other, or with `merge` together. `whole`: sequences
    without a gradient have a backward, too."""

    def __init__(
        self, model: str, threads: int, *, merge: bool, whole: bool = False, config: dict[str, Any] | None = None
    ) -> None:
        if whole:
            pass_run.SAVED_ON_CPU = pass_run.SAVED_ON_CUDA = sys.maxsize  # this process is the way's alone
        settings = {"trainer.merge_passes": merge, "trainer.micro_batch_tokens": BUDGET, **(config or {})}
        loaded = load_config({"base_model": model, "threads": threads, "backend_config": settings})
        self._backend = LoraBackend(loaded)
        self._merge = merge

    def start(self, passes: Sequence[TenantPass]) -> None:
        self.take(passes)
        for number, each in enumerate(passes):
            self._backend.create_model(f"m{number}", spec(each.rank, number))

    def take(self, passes: Sequence[TenantPass]) -> None:
        self._passes = [
            [TrainingPass(f"m{number}", data, each.loss_fn) for data in each.parts]
            for number, each in enumerate(passes)
        ]

    def step(self) -> list[Trained]:
        if not self._merge:
            return [trained for of_model in self._passes for trained in self._step([of_model])]
        return self._step(self._passes)

    def _step(self, passes: Sequence[Sequence[TrainingPass]]) -> list[Trained]:
        """The passes of some models, then the optimizer steps."""
        flat = [each for of_model in passes for each in of_model]
        outcomes = iter(self._backend.run(flat) if self._merge else [self._backend.run([each])[0] for each in flat])
        found = [joined([_result(next(outcomes)) for _ in of_model]) for of_model in passes]
        for of_model in passes:
            self._backend.optim_step(of_model[0].model_id, STEP)
        return found

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._backend.close()


def _result(outcome: PassResult | Exception) -> Trained:
    if isinstance(outcome, Exception):
        raise outcome
    return Trained(outcome.metrics["loss:sum"], np.concatenate(outcome.logprobs), outcome.metrics[COMPUTED])


def joined(parts: Sequence[Trained]) -> Trained:
    """What the requests of a tenant have given together."""
    logprobs = np.concatenate([part.logprobs for part in parts])
    return Trained(sum(part.loss for part in parts), logprobs, sum(part.rows for part in parts))


def plain_device(threads: int) -> torch.device:
    """As the server chooses its device, without the settings that it makes on CUDA: torch's defaults hold there."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(threads)
    return torch.device("cpu")


class PeftWay:
    """A loop over PEFT and transformers' SDPA attention, with micro-batches of what the logits allow.

    Sequences are padded to the longest of their micro-batch. With `packed` they lie end to end in one row instead, and
    transformers masks each by the positions, which restart.
    """

    def __init__(self, model: str, threads: int, *, packed: bool) -> None:
        from transformers import AutoModelForCausalLM

        self._device = plain_device(threads)
        dtype = base_dtype(self._device)
        self._mixed = dtype == torch.bfloat16
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._base = loaded.to(self._device).eval().requires_grad_(False)
        self._packed = packed
        self._budget = max(1, min(BUDGET, LOGITS_BYTES // (4 * loaded.config.vocab_size)))

    def start(self, passes: Sequence[TenantPass]) -> None:
        import warnings

        from peft import LoraConfig, get_peft_model

        self.take(passes)
        self._optimizers: list[torch.optim.Optimizer] = []
        targets = [*ATTENTION, *MLP, *UNEMBED]
        for number, each in enumerate(passes):
            name = f"m{number}"
            config = LoraConfig(r=each.rank, lora_alpha=int(ALPHA), target_modules=targets, lora_dropout=0.0)
            with warnings.catch_warnings():  # PEFT warns of an adapter on a tied lm_head
                warnings.simplefilter("ignore")
                if number == 0:
                    self._model: Any = get_peft_model(self._base, config, adapter_name=name)
                else:
                    self._model.add_adapter(name, config)
            self._model.set_adapter(name)
            self._draw(name, spec(each.rank, number))
            trained = [value for value in self._model.parameters() if value.requires_grad]
            self._optimizers.append(
                torch.optim.AdamW(
                    trained,
                    lr=STEP.learning_rate,
                    betas=(STEP.beta1, STEP.beta2),
                    eps=STEP.eps,
                    weight_decay=STEP.weight_decay,
                    fused=self._mixed,
                )
            )

    def take(self, passes: Sequence[TenantPass]) -> None:
        self._passes = list(passes)

    def _draw(self, name: str, of_model: LoraSpec) -> None:
        """Give an adapter the first values of the server's adapter with the same seed."""
        layers = {key: module for key, module in self._model.base_model.model.named_modules() if _has_lora(module)}
        targets = [Target(key, module.in_features, module.out_features) for key, module in layers.items()]
        adapter = Adapter(of_model, targets, torch.device("cpu"))
        views = adapter.views(adapter.weights)
        with torch.no_grad():
            for key, module in layers.items():
                module.lora_A[name].weight.copy_(views[f"{key}.lora_A"])
                module.lora_B[name].weight.copy_(views[f"{key}.lora_B"])

    def step(self) -> list[Trained]:
        found: list[Trained] = []
        for number, (each, optimizer) in enumerate(zip(self._passes, self._optimizers, strict=True)):
            if len(self._passes) > 1:
                self._model.set_adapter(f"m{number}")
            found.append(self._pass(each))
            optimizer.step()
            optimizer.zero_grad()
        synchronize(self._device)
        return found

    def _pass(self, each: TenantPass) -> Trained:
        total, logprobs, rows = 0.0, [], 0
        for first, last in self._micro_batches([len(datum.tokens) for datum in each.data]):
            data = each.data[first:last]
            rows += self._rows([len(datum.tokens) for datum in data])
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
                lp = (self._packed_logprobs if self._packed else self._padded_logprobs)(data)
            inputs = {
                name: torch.from_numpy(np.concatenate([datum.loss_inputs[name] for datum in data])).to(self._device)
                for name in data[0].loss_inputs
            }
            loss = _loss(each.loss_fn, lp, inputs)
            loss.backward()
            total += loss.item()
            logprobs.append(lp.detach().cpu().numpy())
        return Trained(total, np.concatenate(logprobs), rows)

    def _micro_batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Consecutive sequences whose rows, with padding, are within the budget; at least one."""
        first = 0
        for last in range(1, len(lengths)):
            if self._rows(lengths[first : last + 1]) > self._budget:
                yield first, last
                first = last
        yield first, len(lengths)

    def _rows(self, lengths: Sequence[int]) -> int:
        """Of a micro-batch, with its padding."""
        return sum(lengths) if self._packed else max(lengths) * len(lengths)

    def _padded_logprobs(self, data: Sequence[Any]) -> Tensor:
        longest = max(len(datum.tokens) for datum in data)
        ids, targets, mask = (np.zeros((len(data), longest), np.int64) for _ in range(3))
        for row, datum in enumerate(data):
            length = len(datum.tokens)
            ids[row, :length], targets[row, :length] = datum.tokens, datum.loss_inputs["target_tokens"]
            mask[row, :length] = 1
        on_device = [torch.from_numpy(array).to(self._device) for array in (ids, targets, mask)]
        logits = self._model(input_ids=on_device[0], attention_mask=on_device[2], use_cache=False).logits
        return _logprobs(logits, on_device[1])[on_device[2].bool()]

    def _packed_logprobs(self, data: Sequence[Any]) -> Tensor:
        parts = (
            np.concatenate([datum.tokens for datum in data]),
            np.concatenate([np.arange(len(datum.tokens)) for datum in data]),
            np.concatenate([datum.loss_inputs["target_tokens"] for datum in data]),
        )
        ids, positions, targets = (torch.from_numpy(part).to(self._device)[None] for part in parts)
        return _logprobs(self._model(input_ids=ids, position_ids=positions, use_cache=False).logits, targets)[0]

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


def _has_lora(module: nn.Module) -> bool:
    return bool(getattr(module, "lora_A", None))


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def _loss(loss_fn: str, lp: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    if loss_fn == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    ratio = torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0).exp()
    return -(ratio * inputs["advantages"]).sum()


def asked_for(passes: Sequence[TenantPass]) -> list[np.ndarray]:
    """For each pass, which targets have a weight or an advantage: bool [tokens]."""
    name = {"cross_entropy": "weights", "importance_sampling": "advantages"}
    return [np.concatenate([datum.loss_inputs[name[each.loss_fn]] != 0 for datum in each.data]) for each in passes]


def gaps(ours: Sequence[Trained], theirs: Sequence[Trained], passes: Sequence[TenantPass]) -> tuple[float, float]:
    """The largest difference of losses per target, and the largest difference of logprobs. Both count only the targets
    that the loss asks for."""
    of_loss, of_logprobs = 0.0, 0.0
    for one, other, asked in zip(ours, theirs, asked_for(passes), strict=True):
        of_loss = max(of_loss, abs(one.loss - other.loss) / max(1, int(asked.sum())))
        difference = np.abs(one.logprobs[asked] - other.logprobs[asked])
        of_logprobs = max(of_logprobs, float(difference.max()) if len(difference) else math.nan)
    return of_loss, of_logprobs
