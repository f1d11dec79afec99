"""The keys of `--backend-config`, with their types and bounds. They have the names that operators of SkyRL know.

An unknown key is an error that names the nearest known key. `skyrl.base.config.skyrl_keys` tells what becomes of
SkyRL's other keys.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from skyrl.base.config import skyrl_keys
from skyrl.base.model_files import TrainMlpOfMixtures

LAST_PORT = 65535
DEFAULT_SLOTS = 8
MAX_LORAS = "trainer.policy.model.lora.max_loras"
ONLY_SERVE = (
    "is for a server of one base model that trains adapters and runs its vLLMs on this machine without Ray: give a "
    "number"
)


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message names the key and what is allowed."""


def _are_amounts(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if not name or not 0 <= amount < math.inf:
            raise ValueError(f"{name!r}: {amount} is not an amount of a resource")
        if name == "object_store_memory":
            raise ValueError(f"{name!r}: Ray gives no memory of its object store to actors; leave it out")
    return resources


def _number_or_auto(value: Any) -> int | str:
    if value == "auto":
        return value
    if isinstance(value, str) and value.isdecimal() or isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value >= 1:
        return int(value)
    raise ValueError('must be a whole number of at least 1, or "auto"')


class Strict(BaseModel):
    """A model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Kernels = Literal["torch", "compiled", "triton"]

Resources = Annotated[dict[str, float], AfterValidator(_are_amounts)]
"""Amounts of Ray's resources, by name: `CPU`, `GPU`, or a name that the operator has given to nodes."""


class PlacementConfig(Strict):
    """Where training runs. With `colocate_all`, trainer and vLLM share one device and take turns.

    The trainer has `policy_num_nodes` times `policy_num_gpus_per_node` ranks, one on each GPU; or, on machines without
    GPUs, `policy_num_cpu_ranks` ranks. Each rank asks Ray for `policy_resources` besides its GPU or CPU. With
    `expert_parallel` each rank holds some experts of every layer of a mixture, and rows travel to their experts."""

    colocate_all: bool = False
    policy_num_gpus_per_node: int = Field(1, ge=1, le=64, strict=True)
    policy_num_nodes: int = Field(1, ge=1, le=1024, strict=True)
    policy_num_cpu_ranks: int | None = Field(None, ge=1, le=1024, strict=True)
    policy_resources: Resources = Field(default_factory=dict)
    expert_parallel: bool = Field(False, strict=True)

    @property
    def ranks(self) -> int:
        """The number of the trainer's ranks."""
        return self.policy_num_cpu_ranks or self.policy_num_nodes * self.policy_num_gpus_per_node


class LoraConfig(Strict):
    """Limits on adapters. `max_loras`, `max_cpu_loras` and `max_lora_rank` are passed to vLLM's options of these names;
    the trainer takes ranks up to `max_lora_rank`, too. `alpha` / rank is the scale of each adapter's update. With
    `max_loras` "auto", `skyrl serve` puts a number in its place before it starts anything.

    `train_mlp_of_mixtures`: what `train_mlp` means for a mixture of experts. `train`: adapters train experts, and vLLM
    keeps room for them in each of `max_loras` slots. `leave_out`: they train the other layers; sessions and metrics say
    so. `refuse`: the request is refused."""

    max_loras: Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)] = DEFAULT_SLOTS
    max_cpu_loras: int = Field(64, ge=1)
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 32
    alpha: float = Field(32.0, gt=0)
    train_mlp_of_mixtures: TrainMlpOfMixtures = "train"

    @model_validator(mode="after")
    def _cpu_at_least_gpu(self) -> LoraConfig:
        if self.max_loras != "auto" and self.max_cpu_loras < self.max_loras:
            raise ValueError("max_cpu_loras must be at least max_loras")
        return self

    @property
    def slots(self) -> int:
        """`max_loras` as a number. Raises ConfigError for "auto" where nobody has put one in its place."""
        if self.max_loras == "auto":
            raise ConfigError(f'{MAX_LORAS}: "auto" {ONLY_SERVE}')
        return self.max_loras


class PolicyModelConfig(Strict):
    lora: LoraConfig = Field(default_factory=LoraConfig)  # pyright: ignore[reportArgumentType]


class PolicyConfig(Strict):
    model: PolicyModelConfig = Field(default_factory=PolicyModelConfig)


class TrainerConfig(Strict):
    """With `full_finetuning` the server trains all parameters of one model at a time, and no adapters.

    `micro_batch_tokens` bounds the tokens of one forward/backward pass over the base model; shared prompts count once.
    None: what the memory holds, 4,096 to 65,536 on CUDA and 2,048 to 4,096 on a CPU.

    With `merge_passes` (None: only on CUDA), requests of several tenants share one pass over the base model. Then, and
    on CUDA in any case, other tenants' training changes a tenant's weights by rounding. On a CPU without
    `merge_passes` it does not change them.

    `attention`: how layers attend: "sdpa", a call for the sequences of each length, or, on GPUs alone, "varlen", one
    call for sequences of any lengths.

    With `gradient_checkpointing` a micro-batch keeps only the inputs of the decoder layers, and computes the layers
    again in its backward. "auto": only if its activations would take more than half of the free memory.

    `kernels`: what computes norms, rotary embeddings and gated MLPs: torch's operations, torch.compile, or own Triton
    kernels (GPUs only), which then also compute target logprobs.

    With `cuda_graphs` a trainer on one GPU starts what plain decoder layers compute beside their attention as CUDA
    graphs: few calls of the host instead of hundreds of operations. They hold up to a quarter of the memory that is
    free after loading.

    With `keep_quantized` the trainer's weights of a quantized release keep the bits that they have in its files.

    Over several ranks, a sequence of at least `context_parallel_tokens` tokens is divided: each rank computes a part of
    it. None: no sequence is divided.

    A rank that waits `rank_timeout_s` for another rank, or does not answer the engine for so long, counts as dead. Then
    all ranks are started again. Loading the base model and one micro-batch must take less time."""

    placement: PlacementConfig = Field(default_factory=PlacementConfig)  # pyright: ignore[reportArgumentType]
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    full_finetuning: bool = Field(False, strict=True)
    micro_batch_tokens: int | None = Field(None, ge=16)
    merge_passes: bool | None = None
    attention: Literal["sdpa", "varlen"] = "sdpa"
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    kernels: Kernels = "torch"
    cuda_graphs: bool = Field(False, strict=True)
    keep_quantized: bool = Field(False, strict=True)
    context_parallel_tokens: int | None = Field(None, ge=32, strict=True)
    rank_timeout_s: float = Field(300.0, gt=0)


class InferenceEngineConfig(Strict):
    """The `num_engines` vLLMs (replicas) that this server runs. More than one have a router in front of them. `port` is
    that of the first replica; the next ones follow. `engine_init_kwargs` are options of vLLM under vLLM's own names.

    A watchdog asks vLLM every `probe_interval_s` whether it works. vLLM is killed and started again when its API server
    gives no answer for `health_timeout_s`, or when its engine finishes no step for `step_timeout_s`. If that is not
    set, it is longer on a CPU with a context above 8,192 tokens, because one prompt is one step there.

    With `compare_with_trainer` (None: for vLLMs that this server runs) a server starts only if random adapters on each
    kind of trained layer change logprobs in vLLM as they do in the trainer.

    On a Ray cluster each replica asks for `resources` besides its GPUs; by default for the `CPU`s of `threads`."""

    num_engines: int = Field(1, ge=1, le=64, strict=True)
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int = Field(256, ge=1)
    port: int | None = Field(None, ge=1, le=LAST_PORT)
    probe_interval_s: float = Field(5.0, gt=0)
    health_timeout_s: float = Field(60.0, gt=0)
    step_timeout_s: float = Field(300.0, gt=0)
    compare_with_trainer: bool | None = None
    resources: Resources = Field(default_factory=dict)
    engine_init_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def engine_options(self) -> dict[str, Any]:
        """`engine_init_kwargs`, with underscores in the names."""
        return {name.replace("-", "_"): value for name, value in self.engine_init_kwargs.items()}

    @property
    def ports(self) -> list[int] | None:
        """The port of each replica; None if free ports are to be found."""
        return None if self.port is None else [self.port + number for number in range(self.num_engines)]


class GeneratorConfig(Strict):
    inference_engine: InferenceEngineConfig = Field(
        default_factory=InferenceEngineConfig  # pyright: ignore[reportArgumentType]
    )


class BackendConfig(Strict):
    """The value of `--backend-config`. `parse_backend_config` makes it from nested or dotted keys."""

    trainer: TrainerConfig = Field(default_factory=TrainerConfig)  # pyright: ignore[reportArgumentType]
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)

    @property
    def lora(self) -> LoraConfig:
        return self.trainer.policy.model.lora

    @property
    def inference(self) -> InferenceEngineConfig:
        return self.generator.inference_engine


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted names of all keys whose values are not objects with keys of their own."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        field_type = field.annotation
        if isinstance(field_type, type) and issubclass(field_type, BaseModel):
            keys += known_keys(field_type, f"{dotted}.")
        else:
            keys.append(dotted)
    return keys


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The message for a key that is not among the known ones."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    return f"unknown key '{key}'; the nearest known one is '{nearest}'"


def _flatten(value: dict[str, Any], leaves: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The values under dotted keys. The values of `leaves` (dotted keys) stay as they are, even if they are objects."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        dotted = f"{prefix}{key}"
        if isinstance(item, dict) and dotted not in leaves:
            flat |= _flatten(item, leaves, f"{dotted}.")
        else:
            flat[dotted] = item
    return flat


def dotted_keys(value: dict[str, Any]) -> dict[str, Any]:
    """The values of nested or dotted keys, this server's or SkyRL's, under this server's dotted keys.

    Raises ConfigError when keys of SkyRL's cannot be honoured. The message names all of them, each with the reason.
    """
    known = known_keys(BackendConfig)
    flat = _flatten(value, {*known, *skyrl_keys.KEYS, *skyrl_keys.OLD_NAMES})
    own, refused = skyrl_keys.own_keys(flat, known)
    if refused:
        raise ConfigError(f"backend-config: {'. '.join(refused)}")
    return own


def parse_backend_config(value: dict[str, Any]) -> BackendConfig:
    """The backend configuration from nested or dotted keys.

    Raises ConfigError: a key is unknown, a key of SkyRL's cannot be honoured, or a value has the wrong type or is out
    of bounds.
    """
    known = known_keys(BackendConfig)
    nested: dict[str, Any] = {}
    for dotted, item in dotted_keys(value).items():
        if any(key.startswith(f"{dotted}.") for key in known):
            raise ConfigError(f"backend-config: '{dotted}' must be an object (got {item!r})")
        if dotted not in known:
            raise ConfigError(f"backend-config: {unknown_key(dotted, known)}")
        *parents, leaf = dotted.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = item
    try:
        return BackendConfig.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"backend-config: '{where}': {message} (got {first['input']!r})") from error
