"""The vLLM command line as a function of the configuration.

Knows vLLM's options and environment variables, and why each is set. Starts nothing, imports neither vLLM nor
torch. Reads one file, the base model's `config.json`, where the model is a local directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from skyrl.config.server import ConfigError, ServerConfig
from skyrl.inference.placement import ServerSpec
from skyrl.vllm_plugin.incarnation import IncarnationHeader

HOST = "127.0.0.1"
CPU_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
CPU_CONTEXT = 4096
CPU_BLOCK_TOKENS = 128
CPU_KV_BYTES = 256 * 2**20
MAX_LOGPROBS = 64
OURS = frozenset({"api_key", "host", "model", "port", "served_model_name"})
REPEATED = frozenset({"middleware"})
"""Options of vLLM that take one value, and may be given several times."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""For processes that find the model on this machine: they do not ask the hub, and lose no time when it is away."""
NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""For processes whose output goes to a log, where a progress bar would be one line of many kilobytes."""

_MIDDLEWARE = (f"{IncarnationHeader.__module__}.{IncarnationHeader.__name__}",)
"""Without it the engine cannot tell one start of vLLM from the next; an operator's own comes after it."""

_ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    # /sleep, /wake_up and /is_sleeping. The plugin puts them behind the key, which vLLM does not.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MAX_STOP_STRINGS": "64",  # default 4; Tinker has no limit
    # uvicorn's default closes idle connections after 5 s, just as a pool sends the next request on one.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    # vLLM's processes talk to each other over loopback. By default they use what the machine's name resolves to.
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    **NO_PROGRESS_BARS,
    # vLLM imports 5,000 modules: ready after 27 s without byte code, 16 s with. Empty means "do write it".
    "PYTHONDONTWRITEBYTECODE": "",
}

_CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it a CPU platform turns `uni` into a third process
    "SKYRL_VLLM_FORK_ENGINE": "1",  # ready after 9 s instead of 16 s, and 200 MB less
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` puts every server on core 0
    # Dynamo compiles one helper of the sampler in the first request: 1.8 s and a C++ compiler for nothing.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton; the plugin patches the other one
}


def vllm_spec(
    config: ServerConfig,
    port: int,
    api_key: str,
    *,
    cuda: bool,
    directory: Path | None = None,
    offline: bool = False,
    tested: bool = True,
) -> ServerSpec:
    """The server for this configuration. `directory` takes the sockets between its processes and its temporary files,
    which vLLM leaves behind however it ends. `offline`: it does not ask the model hub. A version of vLLM that is not
    `tested` gets no development endpoints, because the plugin does not put them behind the key there.

    Raises ConfigError for options of vLLM that skyrl sets itself, and for tensor parallelism without GPUs.
    """
    inference = config.backend_config.inference
    passed = {name.replace("-", "_"): value for name, value in inference.engine_init_kwargs.items()}
    if "middleware" in passed:
        passed["middleware"] = [*_MIDDLEWARE, *_names(passed["middleware"])]
    if taken := sorted(OURS & passed.keys()):
        raise ConfigError(f"engine_init_kwargs: '{taken[0]}' is set by skyrl and cannot be passed through")
    env = _ENV | {"VLLM_API_KEY": api_key}
    if directory is not None:
        env["TMPDIR"] = str(directory)
        if cuda:  # what is compiled is for the next start too; torch's own default is in TMPDIR
            cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
            env["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
    if not tested:
        del env["VLLM_SERVER_DEV_MODE"]
    if offline or Path(config.base_model_path).is_dir():
        env |= OFFLINE
    options = _common_options(config, port, api_key)
    if cuda:
        options |= _gpu_options(config)
    else:
        cpu_options, kv_gib = _cpu_options(config, read_model_config(config.base_model_path))
        options |= cpu_options
        threads = str(config.threads)
        env |= _CPU_ENV | {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
    argv = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *render(options | passed))
    return ServerSpec(argv=argv, env=env, host=HOST, port=port, log_name="vllm.log")


def render(options: dict[str, Any]) -> list[str]:
    """Command-line arguments: True is a flag, False its `--no-` form, None is left out, a mapping is JSON. An option of
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


def _names(given: Any) -> list[str]:
    """An operator's value of an option that may be given several times: one name, several, or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def context_length(config: ServerConfig, *, cuda: bool) -> int | None:
    """Longest sequence served: as configured, else (CPU) the model's own up to 4096, else None: vLLM decides."""
    configured = config.backend_config.inference.max_model_len
    if configured is not None or cuda:
        return configured
    return min(CPU_CONTEXT, read_model_config(config.base_model_path).get("max_position_embeddings", CPU_CONTEXT))


def read_model_config(model: str) -> dict[str, Any]:
    """The text model's part of `config.json`; empty when the model is not a local directory."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    values = json.loads(path.read_text())
    return values.get("text_config", values)


def cuda_devices() -> list[str]:
    """CUDA devices that this process may use, by name or number, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device.strip() not in ("", "-1")]
    found = [entry for entry in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", entry)]
    return [str(number) for number in range(len(found))]


def inference_devices(config: ServerConfig, devices: Sequence[str]) -> list[str]:
    """The CUDA devices that vLLM gets of this machine's `devices`: the ones after the trainer's. Colocated, or with too
    few for both, the trainer and vLLM share the first ones."""
    wanted = config.backend_config.inference.tensor_parallel_size
    own = config.backend_config.trainer.placement.policy_num_gpus_per_node
    trainer = own if config.modes.forwards else 0
    after = list(devices[trainer : trainer + wanted])
    return after if len(after) == wanted else list(devices[:wanted])


def plugin_installed() -> bool:
    """Whether vLLM will find `skyrl.vllm_plugin`; without it LoRA on a CPU is wrong, dev endpoints are open."""
    return any(point.name == "skyrl" for point in entry_points(group="vllm.general_plugins"))


def options_named(config: ServerConfig, sentence: str) -> str:
    """The configured options of vLLM that a sentence in vLLM's log names, with their values; empty for none."""
    inference = config.backend_config.inference
    prefix = "generator.inference_engine"
    given = {f"{prefix}.engine_init_kwargs.{name}": value for name, value in inference.engine_init_kwargs.items()}
    own = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "tensor_parallel_size")
    given |= {f"{prefix}.{name}": getattr(inference, name) for name in own}
    lora = config.backend_config.lora
    given |= {f"trainer.policy.model.lora.{name}": getattr(lora, name) for name in ("max_loras", "max_cpu_loras")}
    given["base_model"] = config.base_model_path
    words = set(re.findall(r"[\w/.-]+", sentence.replace("--", " ")))

    def is_named(key: str) -> bool:
        name = key.rpartition(".")[2].replace("-", "_")
        return bool({name, name.replace("_", "-")} & words)

    named = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None and is_named(key)]
    return ", ".join(named)


def _common_options(config: ServerConfig, port: int, api_key: str) -> dict[str, Any]:
    lora, inference = config.backend_config.lora, config.backend_config.inference
    return {
        "model": config.base_model_path,
        "served_model_name": list(config.served_names),
        "host": HOST,
        "port": port,
        "max_num_seqs": inference.max_num_seqs,
        "scheduling_policy": "priority",  # skyrl.sampling.fair_order decides which sample is next
        "enable_lora": True,
        "max_loras": lora.max_loras,
        "max_cpu_loras": lora.max_cpu_loras,
        "max_lora_rank": lora.max_lora_rank,
        # Otherwise a model's generation_config.json changes top_k and top_p of requests that leave them out.
        "generation_config": "vllm",
        # vLLM's default is 0 for every server: restarts and replicas would draw the same "random" samples.
        "seed": int.from_bytes(hashlib.sha256(f"{api_key}:{port}".encode()).digest()[:4]) % 2**31,
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        "disable_uvicorn_access_log": True,
        "middleware": _MIDDLEWARE,
        "use_tqdm_on_load": False,
    }


def _gpu_options(config: ServerConfig) -> dict[str, Any]:
    inference = config.backend_config.inference
    return {
        "dtype": "bfloat16",
        "max_model_len": inference.max_model_len,
        "tensor_parallel_size": inference.tensor_parallel_size,
        "gpu_memory_utilization": inference.gpu_memory_utilization,
        "enable_sleep_mode": None if config.modes.forwards else True,
    }


def _cpu_options(config: ServerConfig, model: dict[str, Any]) -> tuple[dict[str, Any], int]:
    inference = config.backend_config.inference
    if inference.tensor_parallel_size > 1:
        raise ConfigError("generator.inference_engine.tensor_parallel_size: more than 1 needs GPUs")
    length = context_length(config, cuda=False)
    assert length is not None
    blocks, kv_gib = _kv_cache(model, length, inference.max_num_seqs)
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": length,
        # A seeded request whose prompt is split kills the engine ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, length),
        "distributed_executor_backend": "uni",
        "num_gpu_blocks_override": blocks,
        "lora_target_modules": CPU_LORA_TARGETS,
    }, kv_gib


def _kv_cache(model: dict[str, Any], length: int, sequences: int) -> tuple[int | None, int]:
    """Blocks of the key-value cache, and its size in GiB. None for the blocks: vLLM divides the GiB into blocks, and
    touches all of that memory.

    The cache holds every sequence at full length if that fits into 256 MiB, else as many blocks as fit. A bigger model
    gets whole GiB.
    """
    try:
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        block_bytes = 2 * 4 * CPU_BLOCK_TOKENS * model["num_hidden_layers"] * heads * width
    except KeyError:
        return None, 4
    per_sequence = math.ceil(length / CPU_BLOCK_TOKENS)
    fitting = CPU_KV_BYTES // block_bytes
    if fitting < 8 * per_sequence:
        return None, max(4, math.ceil(per_sequence * block_bytes / 2**30))
    return min(fitting, per_sequence * sequences) + 1, 1
