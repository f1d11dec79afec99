"""Configuration keys, backends and flags of SkyRL's Tinker server, and what becomes of each here.

A key of SkyRL's is taken (its value means what this server does anyway), or is this server's key of another name, or is
refused with the reason and with what to use instead. Does not check types or bounds of values.
`python -m skyrl.base.config.skyrl_keys` prints all of them; `docs/operating/coming-from-skyrl.md` names that command.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = "generator.inference_engine."
ENGINE_OPTIONS = f"{ENGINE}engine_init_kwargs"
LORA = "trainer.policy.model.lora."
FULL = "trainer.full_finetuning"
MEGATRON = "trainer.policy.megatron_config."


@dataclass(frozen=True)
class Entry:
    """What becomes of a key or a flag. `takes`: values that mean what this server does anyway; they are dropped.
    `becomes`: this server's name for the key. `sets`: by value, this server's key and its value. `why`: the reason for
    which any other value is refused."""

    takes: tuple[object, ...] = ()
    becomes: str | None = None
    sets: tuple[tuple[object, str, object], ...] = ()
    why: str = ""

    def accepts(self, value: object) -> bool:
        """Whether `value` means what this server does anyway. 1, 1.0 and True are different values."""
        return any(_same(value, taken) for taken in self.takes)

    def set_by(self, value: object) -> tuple[str, object] | None:
        """This server's key that `value` sets, and the value it gets."""
        return next(((key, own) for given, key, own in self.sets if _same(value, given)), None)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def _taken(*values: object, why: str) -> Entry:
    return Entry(takes=values, why=why)


def _becomes(name: str) -> Entry:
    return Entry(becomes=name)


def _refused(why: str) -> Entry:
    return Entry(why=why)


_MEGATRON = "--backend fsdp does here what SkyRL needs megatron for: many tenants' LoRA adapters on one base model"
_JAX = "SkyRL's jax backend is written for TPUs; --backend fsdp trains on a CPU or on an NVIDIA GPU"
_DATA_PARALLEL = (
    "the trainer's ranks each hold a shard of every layer, and divide the data: trainer.placement.policy_num_nodes and "
    "policy_num_gpus_per_node are their numbers"
)
_DIVIDED_SEQUENCES = "trainer.context_parallel_tokens divides long sequences over all ranks of the trainer"
_DIVIDED_EXPERTS = "trainer.placement.expert_parallel divides the experts of a mixture over all ranks of the trainer"
_TENSOR_ONLY = f"vLLM is spread over GPUs by {ENGINE}tensor_parallel_size alone"
_BY_TOKENS = "a pass is cut by tokens, not by sequences: trainer.micro_batch_tokens is what to lower for less memory"
_DTYPE = "the device decides: bfloat16 base weights on CUDA, float32 on a CPU"
_NO_CRITIC = "there is no critic model; a client may train one as a model of its own"
_NO_REFERENCE = "the base model is the reference: clients call compute_logprobs of its sampling client"
_CLIENT_LOOP = "the training loop runs in the client; the server only answers its requests"
_NO_SYNC = "no weights are sent: vLLM loads each saved adapter from its directory"
_EXTERNAL = "give the other server's address as --external-inference-url"
_VLLM_PROCESSES = f"this server sets the environment of vLLM's processes; vLLM's options go into {ENGINE_OPTIONS}"
_LOGS = "logs are in the state directory (--state-dir), under logs/; metrics go to the client with each result"
_STORE = "clients save by name; where the files lie is --checkpoint-store, or the state directory"

BACKENDS: dict[str, Entry] = {
    "fsdp2": _becomes("fsdp"),
    "megatron": _refused(_MEGATRON),
    "jax": _refused(_JAX),
}
"""Values of `--backend` that SkyRL knows and this server does not."""

_STRATEGY = _taken("fsdp", "fsdp2", why=_MEGATRON)

KEYS: dict[str, Entry] = {
    "strategy": _STRATEGY,
    "trainer.strategy": _STRATEGY,
    "keep_runtime_warm_on_last_unload": _taken(True, why="the base model stays loaded when the last model is unloaded"),
    "trainer.policy.model.path": _refused("give the base model as --base-model"),
    f"{LORA}rank": Entry(
        sets=((0, FULL, True),),
        why=f"clients choose the rank; {LORA}max_lora_rank bounds it, and 0 here means {FULL}",
    ),
    f"{LORA}dropout": _taken(0, 0.0, why="adapters are trained without dropout"),
    f"{LORA}target_modules": _taken(
        "all-linear", why="clients choose among train_attn, train_mlp and train_unembed; by default all linear layers"
    ),
    f"{LORA}exclude_modules": _taken(None, why="clients choose among train_attn, train_mlp and train_unembed"),
    f"{LORA}init_method": _taken("kaiming", why="adapters begin as PEFT's do: A drawn by kaiming_uniform, B zero"),
    f"{LORA}lora_sync_path": _refused("adapters lie in the state directory (--state-dir), under adapters/"),
    f"{MEGATRON}lora_config.merge_lora": _taken(
        False, why="adapters are never merged: vLLM applies each tenant's own to the shared base model"
    ),
    f"{MEGATRON}lora_config.lora_type": _taken("lora", why="adapters are plain LoRA in PEFT's format"),
    f"{MEGATRON}tensor_model_parallel_size": _taken(1, why=_DATA_PARALLEL),
    f"{MEGATRON}pipeline_model_parallel_size": _taken(1, why=_DATA_PARALLEL),
    f"{MEGATRON}context_parallel_size": _taken(1, why=_DIVIDED_SEQUENCES),
    f"{MEGATRON}expert_model_parallel_size": _taken(1, why=_DIVIDED_EXPERTS),
    f"{MEGATRON}expert_tensor_parallel_size": _taken(1, None, why=_DATA_PARALLEL),
    "trainer.policy.sequence_parallel_size": _taken(1, why=_DIVIDED_SEQUENCES),
    "trainer.policy.fsdp_config.cpu_offload": _taken(False, why="weights and optimizer states stay on the device"),
    "trainer.policy.fsdp_config.fsdp_size": _taken(-1, 1, why=_DATA_PARALLEL),
    "trainer.policy.language_model_only": _taken(
        False, why=f"{ENGINE}language_model_only decides for the trainer, too: with it images are refused"
    ),
    "trainer.policy.use_torch_compile": _taken(False, why="the trainer does not compile the model"),
    "trainer.gradient_checkpointing_use_reentrant": _taken(False, why="checkpointing is not reentrant"),
    "trainer.max_tokens_per_microbatch": _becomes("trainer.micro_batch_tokens"),
    "trainer.micro_train_batch_size_per_gpu": _refused(_BY_TOKENS),
    "trainer.micro_forward_batch_size_per_gpu": _refused(_BY_TOKENS),
    "trainer.remove_microbatch_padding": _taken(True, why="sequences are packed without padding"),
    "trainer.use_sample_packing": _taken(True, why="sequences are packed without padding"),
    "trainer.logprobs_chunk_size": _refused("logits are computed in chunks of a fixed number of bytes"),
    "trainer.fused_lm_head_logprob": _taken(False, why="an option of megatron; logits are computed in chunks here"),
    **{
        f"trainer.{name}": _refused(_CLIENT_LOOP)
        for name in (
            "ckpt_interval",
            "critic_mini_batch_size",
            "dump_data_batch",
            "dump_eval_results",
            "epochs",
            "eval_batch_size",
            "eval_before_train",
            "eval_interval",
            "hf_save_interval",
            "max_ckpts_to_keep",
            "max_prompt_length",
            "max_training_steps",
            "policy_mini_batch_size",
            "project_name",
            "resume_mode",
            "resume_path",
            "run_name",
            "train_batch_size",
            "update_epochs_per_batch",
            "update_ref_every_epoch",
        )
    },
    **{
        f"generator.{name}": _refused(_CLIENT_LOOP)
        for name in ("batched", "eval_n_samples_per_prompt", "max_input_length", "max_turns", "n_samples_per_prompt")
    },
    "trainer.bf16": _refused(_DTYPE),
    "trainer.seed": _refused("clients give a seed when they create a model and with each sample"),
    "trainer.logger": _refused(_LOGS),
    "trainer.log_path": _refused(_LOGS),
    "trainer.ckpt_path": _refused(_STORE),
    "trainer.export_path": _refused(_STORE),
    f"{ENGINE}backend": _taken("vllm", why="samples come from vLLM"),
    f"{ENGINE}run_engines_locally": _taken(True, why=_EXTERNAL),
    f"{ENGINE}external_proxy_url": _taken(None, why=_EXTERNAL),
    f"{ENGINE}external_server_urls": _taken(None, why=_EXTERNAL),
    f"{ENGINE}remote_inference_engine_urls": _refused(_EXTERNAL),
    f"{ENGINE}pipeline_parallel_size": _taken(1, why=_TENSOR_ONLY),
    f"{ENGINE}data_parallel_size": _taken(1, why=_TENSOR_ONLY),
    f"{ENGINE}expert_parallel_size": _taken(1, why=_TENSOR_ONLY),
    f"{ENGINE}enable_pd": _taken(False, why="one vLLM does prefill and decoding"),
    f"{ENGINE}num_prefill": _taken(0, why="one vLLM does prefill and decoding"),
    f"{ENGINE}served_model_name": _refused("give the name as --served-model-name"),
    f"{ENGINE}model_dtype": _refused(_DTYPE),
    f"{ENGINE}enforce_eager": _becomes(f"{ENGINE_OPTIONS}.enforce_eager"),
    f"{ENGINE}max_num_batched_tokens": _becomes(f"{ENGINE_OPTIONS}.max_num_batched_tokens"),
    f"{ENGINE}enable_prefix_caching": _becomes(f"{ENGINE_OPTIONS}.enable_prefix_caching"),
    f"{ENGINE}enable_chunked_prefill": _refused(f"SkyRL does not use it; vLLM's option goes into {ENGINE_OPTIONS}"),
    f"{ENGINE}fully_sharded_loras": _becomes(f"{ENGINE_OPTIONS}.fully_sharded_loras"),
    f"{ENGINE}language_model_only": _becomes(f"{ENGINE_OPTIONS}.language_model_only"),
    f"{ENGINE}speculative_config": _becomes(f"{ENGINE_OPTIONS}.speculative_config"),
    f"{ENGINE}distributed_executor_backend": _refused("vLLM chooses; Ray places whole vLLMs, each on one node"),
    f"{ENGINE}weight_sync_backend": _refused(_NO_SYNC),
    f"{ENGINE}weight_transfer_threshold_cuda_ipc_GB": _refused(_NO_SYNC),
    f"{ENGINE}offload_kv_for_weight_sync": _refused(_NO_SYNC),
    f"{ENGINE}serialized_weight_sync_mode": _refused(_NO_SYNC),
    f"{ENGINE}enable_ray_prometheus_stats": _refused("/statusz has the server's counters, and /metrics those of vLLM"),
    **{
        f"{ENGINE}{name}": _refused(_VLLM_PROCESSES)
        for name in ("enable_return_routed_experts", "use_expandable_segments", "vllm_v1_disable_multiproc")
    },
    f"{ENGINE}router_init_kwargs": _refused("this server sets the options of the router before its vLLMs"),
    "max_lora_rank": _becomes(f"{LORA}max_lora_rank"),
    "gradient_checkpointing": _becomes("trainer.gradient_checkpointing"),
    "sample_max_num_sequences": _becomes(f"{ENGINE}max_num_seqs"),
    "max_lora_adapters": _refused("models are not counted in advance; quota_models bounds those of one tenant"),
    "train_micro_batch_size": _refused(_BY_TOKENS),
    "tensor_parallel_size": _taken(1, why=_DATA_PARALLEL),
    "expert_parallel_size": _taken(1, why=_DIVIDED_EXPERTS),
    "fully_sharded_data_parallel_size": _taken(1, why=_DATA_PARALLEL),
    "num_processes": _taken(1, None, why=_DATA_PARALLEL),
    "coordinator_address": _taken(None, why=_DATA_PARALLEL),
    "mhc_expansion_rate": _taken(1, why=_JAX),
    "enforce_eager": _refused(f"{_JAX}; vLLM's option of this name is {ENGINE}enforce_eager"),
    "shard_attention_heads": _refused(_JAX),
    "loss_chunk_size": _refused("logits are computed in chunks of a fixed number of bytes"),
    "external_inference_url": _refused(_EXTERNAL),
}
"""Keys of `--backend-config`. The last ones, without dots, belong to SkyRL's jax backend."""

FAMILIES: dict[str, str] = {
    "data.": "clients send their data with each request",
    "environment.": "environments and rewards are the client's",
    "generator.sampling_params.": "clients choose how to sample with each request (SamplingParams)",
    "generator.eval_sampling_params.": "clients choose how to sample with each request (SamplingParams)",
    "generator.chat_template": "clients render their conversations into tokens themselves",
    "trainer.algorithm.": "clients choose the loss with each forward_backward (loss_fn, loss_fn_config)",
    "trainer.critic.": _NO_CRITIC,
    "trainer.fully_async.": f"{_CLIENT_LOOP}; samples never wait for training",
    "trainer.mtp.": "draft heads are not trained",
    "trainer.placement.colocate_policy_ref": _NO_REFERENCE,
    "trainer.placement.critic_": _NO_CRITIC,
    "trainer.placement.ref_": _NO_REFERENCE,
    "trainer.policy.fsdp_config.": f"how FSDP shards is not configurable: {_DATA_PARALLEL}",
    MEGATRON: f"it is an option of megatron; {_MEGATRON}",
    "trainer.policy.model_config_kwargs.": "the base model runs as its config.json says",
    "trainer.policy.optimizer_config.": "clients send the optimizer's values with each optim_step (AdamParams)",
    "trainer.policy.torch_profiler_config.": "the trainer has no profiler",
    "trainer.ref.": _NO_REFERENCE,
}
"""By prefix: why other keys are refused that begin with it and are not this server's. The longest prefix counts."""

OLD_NAMES: dict[str, str] = {
    "generator.num_inference_engines": f"{ENGINE}num_engines",
    "generator.inference_engine_tensor_parallel_size": f"{ENGINE}tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": f"{ENGINE}pipeline_parallel_size",
    "generator.inference_engine_data_parallel_size": f"{ENGINE}data_parallel_size",
    "generator.inference_engine_expert_parallel_size": f"{ENGINE}expert_parallel_size",
    **{
        f"generator.{name}": f"{ENGINE}{name}"
        for name in (
            "backend",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "engine_init_kwargs",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "max_num_seqs",
            "model_dtype",
            "remote_inference_engine_urls",
            "run_engines_locally",
            "weight_sync_backend",
        )
    },
}
"""By SkyRL's names from before it had `generator.inference_engine`: the names that it uses since."""

FLAGS: dict[str, Entry] = {
    "--checkpoints-base": _becomes("--checkpoint-store"),
    "--forwarding-inference-timeout-sec": _becomes("--forwarding-deadline-s"),
    "--session-timeout-sec": _becomes("--session-timeout-s"),
    "--no-use-ray": Entry(takes=(None,)),
    "--use-ray": _refused("give --ray-address: local, auto, or HOST:PORT of a cluster"),
    "--external-inference-lora-base": _refused(
        "adapters lie in the state directory, under adapters/: the external server must be able to read that path"
    ),
    "--session-cleanup-interval-sec": _refused("there is nothing to set; --session-timeout-s says when a session ends"),
    "--external-future-retrieved-ttl-sec": _refused("results stay for result_retention_s (a key of the TOML file)"),
    "--external-future-completed-ttl-sec": _refused("results stay for result_retention_s (a key of the TOML file)"),
    "--engine-startup-timeout-sec": _refused("there is no such limit: /readyz says what a starting server waits for"),
    "--torch-profiler": _refused("the trainer has no profiler"),
    "--runtime-role": _refused("one `skyrl serve` trains and samples; one that only samples is --backend none"),
}
"""Flags of `python -m skyrl.tinker.api` that `skyrl serve` does not have under that name."""


def checkpoint_store(base: str) -> str:
    """The value of `--checkpoint-store` for one of `--checkpoints-base`: file:///... for a path, a URL unchanged."""
    return base if "://" in base else f"file://{Path(base).expanduser().absolute()}"


def own_keys(flat: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of `flat` under this server's names, and a sentence for each key that is refused.

    `known` are this server's keys. A key that neither server has is kept as it is.
    """
    own: dict[str, Any] = {}
    engine_options: dict[str, Any] = {}
    refused: list[str] = []
    for given, value in flat.items():
        key = OLD_NAMES.get(given, given)
        entry = KEYS.get(key)
        name = entry.becomes if entry is not None and entry.becomes else key
        if entry is not None and entry.accepts(value):
            continue
        if entry is not None and (set_by := entry.set_by(value)) is not None:
            name, value = set_by
            entry = None
        if name.startswith(f"{ENGINE_OPTIONS}."):
            engine_options[name.removeprefix(f"{ENGINE_OPTIONS}.")] = value
        elif entry is not None and not entry.becomes:
            refused.append(f"'{given}' cannot be {f'{value!r}' if entry.takes else 'set here'}: {entry.why}")
        elif name in own and own[name] != value:
            refused.append(f"'{given}' and another key both set '{name}': leave one of them")
        elif name in known or (why := _why_refused_by_prefix(key)) is None:
            own[name] = value
        else:
            refused.append(f"'{given}' cannot be set here: {why}")
    if engine_options:
        given_options = own.get(ENGINE_OPTIONS, {})
        own[ENGINE_OPTIONS] = engine_options | given_options if isinstance(given_options, dict) else given_options
    return own, refused


def _why_refused_by_prefix(key: str) -> str | None:
    matches = [prefix for prefix in FAMILIES if key.startswith(prefix)]
    return FAMILIES[max(matches, key=len)] if matches else None


def listing() -> Iterator[str]:
    """A line for each entry of each table: its name, and what becomes of it here."""
    yield from _section("Values of --backend", BACKENDS)
    yield from _section("Flags", FLAGS)
    yield from _section("Keys of --backend-config; the last ones, without dots, are those of SkyRL's jax backend", KEYS)
    groups = {f"{prefix}*": Entry(why=why) for prefix, why in FAMILIES.items()}
    yield from _section("All other keys that begin so", groups)
    old_names = {old: Entry(becomes=new) for old, new in OLD_NAMES.items()}
    yield from _section("Names from before SkyRL had generator.inference_engine", old_names)


def _section(title: str, table: Mapping[str, Entry]) -> Iterator[str]:
    yield f"\n{title}\n"
    for name, entry in table.items():
        yield f"{name}: {_verdict(entry)}"


def _verdict(entry: Entry) -> str:
    if entry.becomes:
        return f"is {entry.becomes}"
    if not entry.takes:
        return f"refused: {entry.why}"
    taken = f"taken: {', '.join(json.dumps(value) for value in entry.takes)}"
    return f"{taken}; {entry.why}" if entry.why else "taken"


if __name__ == "__main__":
    print("\n".join(listing()))
