"""What every rank of the trainer does: meets the others, loads its share of the model, and runs its shares of passes.

All ranks get the same calls in the same order. A trainer on one device is one rank without others: it has the whole
model, and nobody waits for it. So it alone may join passes, leave out backwards that give nothing, and run a failed
micro-batch again.

A long sequence of a pass is divided over all ranks: each runs its rows through the whole model, and all compute the
loss. Log-probabilities are one number for each target: the ranks gather them, and compute the same loss on all of them.
Knows nothing of what is trained, of how keys, values or states travel, or how calls reach it.
"""

from __future__ import annotations

import resource
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from skyrl.base.config.backend import Kernels
from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.adamw import NonFiniteGradient, adamw_step, gradient_norm
from skyrl.trainer.collectives import SameFailureEverywhere, agree, on_all_or_none
from skyrl.trainer.custom_loss.loss import loss_of
from skyrl.trainer.device import prepare_device
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.losses import served_losses
from skyrl.trainer.model.recomputation import Setting
from skyrl.trainer.model.row_budget import BudgetSettings, RowBudget, measure_row
from skyrl.trainer.passes.pass_run import JoinedPasses, PassRun, ShareResult, SinglePassRun
from skyrl.trainer.protocol import AdamParams, Mixture, TrainingPass
from skyrl.trainer.quantized.weights import held_bytes
from skyrl.trainer.ranks.micro_batches import MicroBatchRunner
from skyrl.trainer.ranks.plan import Plan
from skyrl.trainer.ranks.sharded_model import ModelForm, ShardedModel, load_sharded_model, local_of


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start. `mlp_of_mixtures`: adapters can train the experts of a mixture. `timeout_s`: a
    rank that waits this long for another rank fails. `pictures`: whether a model that sees keeps its vision tower.
    `keep_quantized`: whether weights stay quantized that are quantized in the files. `varlen`: whether attention is
    that of `attention.varlen`. `kernels`: what computes between the products of plain layers. `graphs`: whether plain
    layers run as CUDA graphs."""

    base_model: str
    threads: int
    gradient_checkpointing: Setting
    stable_reinforce: Literal["refuse", "cispo"]
    mlp_of_mixtures: bool
    timeout_s: float
    pictures: bool
    budget: BudgetSettings
    keep_quantized: bool = False
    varlen: bool = False
    kernels: Kernels = "torch"
    graphs: bool = False

    @staticmethod
    def of(config: ServerConfig) -> RankSettings:
        """Those of a server's configuration."""
        trainer = config.backend_config.trainer
        return RankSettings(
            config.base_model_path,
            config.threads,
            trainer.gradient_checkpointing,
            config.losses.stable_reinforce,
            config.backend_config.lora.train_mlp_of_mixtures == "train",
            trainer.rank_timeout_s,
            takes_pictures(config),
            BudgetSettings.of(config),
            trainer.keep_quantized,
            trainer.attention == "varlen",
            trainer.kernels,
            trainer.cuda_graphs,
        )


@dataclass(frozen=True)
class BaseFacts:
    """What the engine needs to know of the base model, and of the memory that this rank has."""

    vocab_size: int
    max_context: int
    device: str
    mixture: Mixture | None
    sight: VisionConfig | None
    ties_unembedding: bool
    budget: RowBudget


class RankBase(MicroBatchRunner):
    """One rank. Its methods must be called on all ranks of the group at the same time, except `memory` and where a
    subclass says so.

    A method raises SameFailureEverywhere if the command has failed on all ranks in the same way. After any other
    exception ranks do not agree any more, and the whole group must be started again; a rank alone goes on.
    """

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        self._rank = rank
        self._ranks = ranks
        self._settings = settings
        self.device = prepare_device(settings.threads)
        self._losses = served_losses(settings.stable_reinforce)
        self.between = lambda: None

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.type

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns its result, or SameFailureEverywhere if it has raised that. For callers in another
        process."""
        try:
            return getattr(self, method)(*arguments)
        except SameFailureEverywhere as agreed:
            return agreed

    def join(self, host: str, port: int, name: str) -> None:
        """Meet the other ranks at rank 0's address, under a name that no other group has.

        Raises an error of torch.distributed if they do not come within the timeout."""
        if self.alone:
            return
        timeout = timedelta(seconds=self._settings.timeout_s)
        store = TCPStore(host, port, self._ranks, is_master=self._rank == 0, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
        )

    def _load_model(self, form: ModelForm) -> ShardedModel:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        self._model = load_sharded_model(
            self._settings.base_model,
            self.device,
            None if self.alone else init_device_mesh(self.device.type, (self._ranks,)),
            form,
            gradient_checkpointing=self._settings.gradient_checkpointing,
            pictures=self._settings.pictures,
            varlen=self._settings.varlen,
            kernels=self._settings.kernels,
            graphs=self._settings.graphs,
            agree=agree,
        )
        self.base = self._model.base
        return self._model

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        """What this rank's memory allows. `targets`: as for `measure_row`."""
        settings, packed = self._settings.budget, self.base.packed
        if settings.measures_on(self.device):
            measure_row(self.base, targets)
            packed.reshard()
        packed.logits_bytes = settings.logits_bytes(packed, self._model.numel)
        return settings.of_model(packed, self._model.numel, self._held(), ranks=self._ranks)

    def _held(self) -> int:
        """Bytes that this rank's parameters of the base model take."""
        return held_bytes(map(local_of, self.base.packed.parameters()))

    def _base_facts(self, targets: Sequence[Target]) -> dict[str, Any]:
        """The fields of `BaseFacts`."""
        base, budget = self.base, self._row_budget(targets)
        self._rows = budget.rows
        return {
            "vocab_size": base.vocab_size,
            "max_context": base.max_context,
            "device": self.device.type,
            "mixture": base.packed.mixture,
            "sight": base.sight,
            "ties_unembedding": base.ties_unembedding,
            "budget": budget,
        }

    def memory(self) -> dict[str, int]:
        """`parameters` of the base model on this rank, of `all_parameters`. In bytes: `held`, what these take; this
        process's peak of resident memory, and the device's peak if it has memory of its own."""
        found = {
            "parameters": self._model.numel,
            "all_parameters": self._model.total,
            "held": self._held(),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.device.type == "cuda":
            found["peak_device"] = torch.cuda.max_memory_allocated(self.device)
        return found

    def leave(self) -> None:
        """Forget everything, and leave the group."""
        if hasattr(self, "base"):
            del self.base, self._model
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()

    def run(self, passes: Sequence[TrainingPass], forwards: Plan, backwards: Plan) -> dict[int, list[ShareResult]]:
        """Run this rank's items of checked passes: the micro-batches of `forwards`, then those of `backwards`. Returns
        the results of this rank's items, by the pass's number and in the order of the plan.

        Each model gets the gradients of its passes that failed on no rank, summed in the order of the ranks.
        """
        singles = [SinglePassRun(self._trained(each.model_id), each, loss_of(each, self._losses)) for each in passes]
        for plan, backward in ((forwards, False), (backwards, True)):
            running: dict[int, PassRun] = {}
            for number, tree in plan.trees.items():
                members = [singles[each] for each in plan.joined.get(number, (number,))]
                running[number] = members[0] if len(members) == 1 else JoinedPasses(members[0].model, members)
                running[number].tree = tree
                if backward:
                    self._begin(running[number])
            self._run_plan(running, plan, backward=backward)
        return {number: running.sent() for number, running in enumerate(singles)}

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """As `adamw_step`. Raises SameFailureEverywhere with NonFiniteGradient or OutOfMemory."""
        model = self._trained(model_id)
        try:
            metrics = adamw_step(
                model, params, norm=self._norm, agreed=lambda action: on_all_or_none(action, self.device)
            )
        except NonFiniteGradient as error:  # of all ranks alike
            raise SameFailureEverywhere(error) from None
        if metrics:
            self._stepped(model)
        return metrics

    def clear_gradient(self, model_id: str) -> None:
        self._trained(model_id).gradient = None

    def _norm(self, model: Any) -> float:
        """Of the model's gradient, the same on all ranks."""
        return on_all_or_none(lambda: gradient_norm(model), self.device)

    @abstractmethod
    def _stepped(self, model: Any) -> None:
        """The model's weights have new numbers."""

    @abstractmethod
    def _trained(self, model_id: str) -> Any:
        """What a pass of the model adds its gradient to."""
