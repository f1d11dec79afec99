"""The vLLM command line as a function of the configuration.

Knows vLLM's options and environment variables, and why each is set. Starts nothing, imports neither vLLM nor
torch. Reads the base model's `config.json` and chat template, where they are on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from skyrl.base.config.server import ConfigError, ServerConfig, takes_pictures
from skyrl.base.model_files import experts_of, model_config, whole_config
from skyrl.inference.model_options import (
    BATCH,
    LEAST,
    check_layers,
    check_served,
    cpu_options,
    kept_adapters,
    longest_context,
    lora_targets,
    picture_options,
    quantization_of,
    text_options,
)
from skyrl.inference.parsers import parser_options
from skyrl.inference.placement import ServerSpec
from skyrl.inference.remote.middleware import StoredAdapterLoads
from skyrl.inference.vllm_plugin.protocol import TELL_VERSIONS_VARIABLE, IncarnationHeader
from skyrl.runtime.processes.host_resources import limit_bytes
from skyrl.runtime.tracing import traces_url

HOST = "127.0.0.1"
MAX_LOGPROBS = 65
"""One more than clients may ask for: skyrl.sampling.pictures says why."""
GRAMMARS = {"backend": "xgrammar"}
"""By default vLLM takes another library for what xgrammar refuses, and keeps the first library for all later requests:
one schema of 50 bytes then stops the server for half a minute (docs/decisions/openai-requests.md)."""
SET_BY_SKYRL = frozenset({"api_key", "host", "lora_target_modules", "model", "port", "served_model_name"})
FULL_SETS = frozenset({"enable_lora", "worker_extension_cls"})
"""Options that skyrl sets for full fine-tuning alone."""
REPEATED = frozenset({"middleware"})
"""Options of vLLM that take one value each, and may be given several times."""

WEIGHT_UPDATES = {"worker_extension_cls": "skyrl.inference.vllm_plugin.weights.worker.WeightUpdates"}
"""vLLM's options for servers whose weights can be replaced while they serve. On a CPU a large model is half as fast
with them."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""For processes that find the model on this machine: they do not ask the hub, and so do not wait when it is away."""
NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""For processes whose output goes to a log, where a progress bar would be one line of many kilobytes."""

THREADS_SLEEP = {"OMP_WAIT_POLICY": "passive"}
"""For processes that compute on a CPU. By default the threads of OpenMP spin while they wait for each other: beside
another process that computes, two threads took 24 to 44 CPU seconds where one took 6, and with this setting 7."""

START, SERVER = "skyrl.inference.vllm_plugin.start", "vllm.entrypoints.openai.api_server"
"""The first module runs the second. Named, not imported: the plugin is for vLLM's own processes."""

_INCARNATION = f"{IncarnationHeader.__module__}.{IncarnationHeader.__name__}"
_STORED_ADAPTERS = f"{StoredAdapterLoads.__module__}.{StoredAdapterLoads.__name__}"

_ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    # /sleep, /wake_up and /is_sleeping. The plugin puts them behind the key, which vLLM does not.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MAX_STOP_STRINGS": "64",  # default 4; Tinker has no limit
    # uvicorn's default closes idle connections after 5 s, just as a pool sends the next request on one.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    # vLLM's processes talk to each other over loopback. By default they use the address of the machine's name.
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    **NO_PROGRESS_BARS,
    # vLLM imports 5,000 modules: ready after 27 s without byte code, 16 s with. Empty means "write byte code".
    "PYTHONDONTWRITEBYTECODE": "",
}

LOGGING_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
_TRACE_ENV = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    # The API process decides which requests are traced. By default vLLM would trace all requests without a decision.
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}

_CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise the executor `uni` starts a third process on a CPU
    "SKYRL_VLLM_FORK_ENGINE": "1",  # ready after 9 s instead of 16 s, and 200 MB less
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` puts every server on core 0
    # Otherwise Dynamo compiles one helper of the sampler in the first request: 1.8 s, and it needs a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # version 2 needs Triton; routed experts are patched in version 1
}


def vllm_spec(
    config: ServerConfig,
    port: int,
    api_key: str,
    *,
    cuda: bool,
    host: str = HOST,
    directory: Path | None = None,
    offline: bool = False,
    tested: bool = True,
    log_name: str = "vllm.log",
    logging_config: Path | None = None,
) -> ServerSpec:
    """One vLLM server for this configuration, which listens at `host`.

    `directory` is for the sockets between the server's processes and for temporary files, which vLLM never deletes.
    With `offline` the server does not ask the model hub. A version of vLLM that is not `tested` gets no development
    endpoints, because the plugin does not protect them with the API key there. `logging_config` is a file that the
    caller writes, by which the server writes lines of JSON if the configuration says so.

    Raises ConfigError for options of vLLM that skyrl sets itself, for models that vLLM does not serve (`check_served`),
    and for adapters that vLLM does not load (`check_layers`); without GPUs, also for tensor parallelism.
    """
    passed_through = config.backend_config.inference.engine_options
    if "middleware" in passed_through:
        own = passed_through["middleware"] or []
        passed_through["middleware"] = [*_middleware(config), *(own if isinstance(own, list | tuple) else [own])]
    if isinstance(given := passed_through.get("structured_outputs_config"), dict):
        passed_through["structured_outputs_config"] = GRAMMARS | given
    if taken := sorted((SET_BY_SKYRL | (FULL_SETS if config.full_finetuning else set())) & passed_through.keys()):
        raise ConfigError(f"engine_init_kwargs: '{taken[0]}' is set by skyrl and cannot be passed through")
    env = _ENV | {"VLLM_API_KEY": api_key}
    if directory is not None:
        env["TMPDIR"] = str(directory)
        if cuda:  # keep compiled code for the next start: torch's default is in TMPDIR
            cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
            env["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
    if not tested:
        del env["VLLM_SERVER_DEV_MODE"]
    if config.otlp_endpoint is not None:
        env |= _TRACE_ENV
    if config.log_format == "json" and logging_config is not None:
        env[LOGGING_CONFIG] = str(logging_config)
    if offline or Path(config.base_model_path).is_dir():
        env |= OFFLINE
    seed = _seed(f"{api_key}:{host}:{port}:{directory or ''}")
    options = _common_options(config, port) | {"host": host, "seed": seed}
    whole, model = whole_config(config.base_model_path), model_config(config.base_model_path)
    mixture = experts_of(model) > 0
    check_served(config.base_model_path, model, cuda=cuda)
    options |= picture_options(cuda=cuda) if takes_pictures(config) else text_options(whole)
    if config.full_finetuning:
        options |= WEIGHT_UPDATES
        if mixture and cuda:
            options["moe_backend"] = "triton"  # other kernels keep experts in forms that updates do not reach
        env[TELL_VERSIONS_VARIABLE] = "1"
    elif config.modes.trains:  # else no adapter ever comes
        check_layers(config, model)
        trains_experts = config.backend_config.lora.train_mlp_of_mixtures == "train"
        targets = lora_targets(mixture=mixture, trains_experts=trains_experts, cuda=cuda)
        lora = config.backend_config.lora
        options |= {
            "enable_lora": True,
            "max_loras": lora.slots,
            "max_cpu_loras": lora.max_cpu_loras if cuda else kept_adapters(model, lora),
            "max_lora_rank": lora.max_lora_rank,
            "lora_target_modules": targets,
        }
    if cuda:
        inference = config.backend_config.inference
        options |= {
            "dtype": "bfloat16",
            "max_model_len": inference.max_model_len,
            "tensor_parallel_size": inference.tensor_parallel_size,
            "gpu_memory_utilization": inference.gpu_memory_utilization,
            "enable_sleep_mode": None if config.modes.forwards else True,
        }
    else:
        of_cpu, kv_gib = _cpu_options(config, read_model_config(config.base_model_path), quantization_of(whole))
        options |= of_cpu
        threads = str(config.threads)
        env |= _CPU_ENV | THREADS_SLEEP | {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
    passed_through |= parser_options(config.base_model_path, passed_through)
    argv = (sys.executable, "-m", START, SERVER, *render(options | passed_through))
    return ServerSpec(argv=argv, env=env, host=host, port=port, log_name=log_name)


def _middleware(config: ServerConfig) -> tuple[str, ...]:
    """The first middleware names each start of vLLM for the engine. The second one fetches adapters from the checkpoint
    store, where vLLM may run on another node and has adapters. An operator's own middleware comes after them."""
    fetches = config.weights_travel and config.modes.trains and not config.full_finetuning
    return (_INCARNATION, _STORED_ADAPTERS) if fetches else (_INCARNATION,)


def render(options: dict[str, Any]) -> list[str]:
    """Command-line arguments: True gives a flag, False its `--no-` form, None nothing, a mapping JSON. An option of
    `REPEATED` is given once for each of its values."""
    argv: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif value is False:
            argv.append(f"--no-{flag[2:]}")
        elif name in REPEATED:
            argv += [word for each in value for word in (flag, str(each))]
        elif isinstance(value, list | tuple):
            argv += [flag, *map(str, value)]
        elif isinstance(value, dict):
            argv += [flag, json.dumps(value)]
        elif value is not None:
            argv += [flag, str(value)]
    return argv


def context_length(config: ServerConfig, *, cuda: bool) -> int | None:
    """The longest sequence served, in tokens: as configured; else, on a CPU, the model's length up to what the memory
    of this machine holds (`longest_context`); else None: vLLM decides.

    A server with several base models, whose vLLMs share the memory, and one whose vLLMs are on the nodes of a Ray
    cluster serve at most 4,096 tokens."""
    inference = config.backend_config.inference
    if inference.max_model_len is not None or cuda:
        return inference.max_model_len
    model = read_model_config(config.base_model_path)
    if config.role.name or config.ray is not None or inference.num_engines > 1:
        return min(LEAST, model.get("max_position_embeddings", LEAST))
    try:
        memory = limit_bytes()
    except FileNotFoundError:
        memory = 0.0
    return longest_context(model, inference.max_num_seqs, memory)


def context_sentence(config: ServerConfig, *, cuda: bool) -> str:
    """What is served, and why, for the log of a start; empty where vLLM decides."""
    length = context_length(config, cuda=cuda)
    if length is None:
        return ""
    key = "generator.inference_engine.max_model_len"
    own = read_model_config(config.base_model_path).get("max_position_embeddings")
    if config.backend_config.inference.max_model_len is not None:
        why = f"as {key} says"
    elif own is not None and length >= own:
        why = "the model's own length"
    else:
        why = f"what this machine's memory easily holds of the model's {own}; {key} sets another length"
    return f"context: sequences of up to {length} tokens, {why}"


def read_model_config(model: str) -> dict[str, Any]:
    """The text model's part of `config.json`; empty when the model is not a local directory."""
    return model_config(model) if Path(model).is_dir() else {}


def cuda_devices() -> list[str]:
    """CUDA devices that this process may use, by name or number, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device.strip() not in ("", "-1")]
    found = [entry for entry in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", entry)]
    return [str(number) for number in range(len(found))]


def inference_devices(config: ServerConfig, devices: Sequence[str], *, has_trainer: bool = True) -> list[list[str]]:
    """The CUDA devices of each replica: those after the trainer's devices. If colocated, or with too few devices for
    both, the trainer and vLLM share the first devices. Without devices each replica has an empty list."""
    inference = config.backend_config.inference
    each = inference.tensor_parallel_size
    wanted = each * inference.num_engines
    own = config.backend_config.trainer.placement.policy_num_gpus_per_node
    trainer = own if has_trainer and config.modes.forwards else 0
    after = list(devices[trainer : trainer + wanted])
    chosen = after if len(after) == wanted else list(devices[:wanted])
    return [chosen[number * each : (number + 1) * each] for number in range(inference.num_engines)]


@cache
def plugin_installed() -> bool:
    """Whether vLLM will find `skyrl.inference.vllm_plugin`. Without the plugin, LoRA on a CPU is wrong, and the
    development endpoints need no key."""
    return any(point.name == "skyrl" for point in entry_points(group="vllm.general_plugins"))


def options_named(config: ServerConfig, sentence: str) -> str:
    """The configured options of vLLM that `sentence` (from vLLM's log) names, with their values; empty if it names
    none."""
    inference = config.backend_config.inference
    prefix = "generator.inference_engine"
    values = {f"{prefix}.engine_init_kwargs.{name}": value for name, value in inference.engine_init_kwargs.items()}
    own = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "tensor_parallel_size")
    values |= {f"{prefix}.{name}": getattr(inference, name) for name in own}
    lora = config.backend_config.lora
    values |= {f"trainer.policy.model.lora.{name}": getattr(lora, name) for name in ("max_loras", "max_cpu_loras")}
    values["base_model"] = config.base_model_path
    words = set(re.findall(r"[\w/.-]+", sentence.replace("--", " ")))

    def is_named(key: str) -> bool:
        name = key.rpartition(".")[2].replace("-", "_")
        return bool({name, name.replace("_", "-")} & words)

    named = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None and is_named(key)]
    return ", ".join(named)


def _seed(start: str) -> int:
    """vLLM's default is 0 for every server: restarts and replicas would draw the same "random" samples. `start` differs
    for each replica, and for each start of the launcher: its directory has another name, also where the key stays."""
    return int.from_bytes(hashlib.sha256(start.encode()).digest()[:4]) % 2**31


def _common_options(config: ServerConfig, port: int) -> dict[str, Any]:
    inference = config.backend_config.inference
    return {
        "model": config.base_model_path,
        "served_model_name": list(config.served_names),
        "port": port,
        "max_num_seqs": inference.max_num_seqs,
        "scheduling_policy": "priority",  # skyrl.sampling.gate decides which sample is next
        # Otherwise a model's generation_config.json sets top_k and top_p of requests without these fields.
        "generation_config": "vllm",
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        "structured_outputs_config": GRAMMARS,
        "disable_uvicorn_access_log": True,
        "middleware": _middleware(config),
        "use_tqdm_on_load": False,
        "otlp_traces_endpoint": None if config.otlp_endpoint is None else traces_url(config.otlp_endpoint),
    }


def _cpu_options(config: ServerConfig, model: dict[str, Any], quantization: str | None) -> tuple[dict[str, Any], int]:
    inference = config.backend_config.inference
    if inference.tensor_parallel_size > 1:
        raise ConfigError("generator.inference_engine.tensor_parallel_size: more than 1 needs GPUs")
    length = context_length(config, cuda=False)
    assert length is not None
    own_block = inference.engine_options.get("block_size")
    options, kv_gib = cpu_options(model, quantization, length, inference.max_num_seqs, own_block)
    return options | {
        "enforce_eager": True,
        "max_model_len": length,
        # A seeded request whose prompt is split kills the engine ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(BATCH, length),
        "distributed_executor_backend": "uni",
    }, kv_gib
