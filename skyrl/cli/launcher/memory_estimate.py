"""Whether the base models of a server fit together into the memory of this machine: an estimate before the start.

On a CPU a base model of P parameters needs about

    vLLMs     num_engines × (1,070 MB + 6 kB × V for the processes + w × (P + E))
    trainer   490 MB for each rank + 4 × P with adapters, 16 × P with full weights (weights, gradient, two moments)

when it is ready, and the server 200 MB more for launcher and API. w = 4 bytes in float32 and 2 in bfloat16; of a
release with fewer bits the bytes of its files count in place of w × P, and with `trainer.keep_quantized` also in place
of 4 × P. V is the vocabulary: each process has a tokenizer. E are the numbers of the embedding, and of the output layer
if it is another matrix: vLLM packs both for its kernels and keeps them beside.

In use come, at most, in each vLLM its key-value cache, the slots of adapters, and either what the tokens keep that it
computes at once, or the logits of all its sequences; and in a trainer of adapters with one rank the largest
micro-batch, as `pass_memory` has it. Passes of several ranks and of full weights are not estimated. On GPUs each vLLM
takes `gpu_memory_utilization` of its GPUs, and what matters is the sum on each GPU.

Reads the headers of the weights' files, and no weights.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.base.adapter_files import DoesNotFit, header_of
from skyrl.base.config.pass_memory import FLOAT_BYTES, FULL_BYTES, Passing, Widths
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import model_config, whole_config
from skyrl.inference.model_options import (
    BATCH,
    adapter_features,
    batch_bytes,
    cpu_options,
    kept_adapters,
    kv_cache_bytes,
    quantization_of,
    slot_features,
)
from skyrl.inference.vllm_command import context_length, inference_devices
from skyrl.runtime.processes.host_resources import free_host_bytes, host_bytes, limit_bytes

logger = logging.getLogger(__name__)

VLLM_BYTES, RANK_BYTES = 780e6, 390e6
"""The processes of a vLLM on a CPU, and of a rank of the trainer, with the tiny model."""
LAUNCHER_BYTES, API_BYTES = 90e6, 110e6
"""The launcher, and each API process."""
TOKEN_BYTES = 6_000
"""Of a token of the vocabulary in the tokenizers of a vLLM's processes, and what is derived from them."""
VLLM_LOADING_BYTES, RANK_LOADING_BYTES = 290e6, 100e6
"""What is left of loading weights and of the check at a start, but at most half and a fourth of the weights. These six
figures are fitted to what `benchmarks.real_memory` measured for the tiny model, SmolLM2-135M (49k tokens) and
Qwen2.5-Coder-0.5B (152k)."""
LOGITS_COPIES = 6
"""Of a sampled token's logits in vLLM's sampler, in float32: it divides, sorts, and makes probabilities of copies."""
SCORES_BYTES = 300e6
"""For the logprobs of a prompt of any length."""
_BIN_BYTES = 2
"""Bytes of a parameter in files whose headers cannot be read; bfloat16 in nearly all releases."""

_LONGEST_HEADER = 100_000_000
"""Bytes, as safetensors has it."""
_PACKED, _BLOCKS = ".weight_packed", "_blocks"
"""Ends of names of tensors whose elements stand for several parameters: int32 of compressed-tensors, bytes of MXFP4."""
_FACTORS = (".weight_scale", ".weight_shape", "_scale_inv", "_scales")
"""Ends of names of tensors beside the numbers of quantized weights."""


@dataclass(frozen=True)
class Size:
    """How large a model is: its parameters, and the bytes of its files."""

    parameters: int
    file_bytes: int


def size_of(base_model: str) -> Size | None:
    """The size of a model on this machine, a directory or a hub's name; None if its files are not here."""
    directory = Path(base_model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache  # takes 0.14 s

        found = try_to_load_from_cache(base_model, "config.json")
        if not isinstance(found, str):
            return None
        directory = Path(found).parent
    parameters = file_bytes = 0
    bits = _bits(whole_config(base_model))
    tensors = sorted(directory.glob("*.safetensors"))
    for file in tensors or sorted(directory.glob("*.bin")):
        file_bytes += file.stat().st_size
        parameters += _parameters(file, bits) if tensors else file.stat().st_size // _BIN_BYTES
    return Size(parameters, file_bytes) if file_bytes else None


def _bits(whole: dict[str, Any]) -> int | None:
    """Of a quantized release's integers, 8 where its config.json does not say 4; None for a model that is not
    quantized. `whole`: all of its config.json."""
    try:
        if quantization_of(whole) is None:
            return None
        found = whole.get("quantization_config") or whole["text_config"]["quantization_config"]
        groups = (found.get("config_groups") or {}).values()
        return 4 if any(group["weights"]["num_bits"] == 4 for group in groups) else 8
    except (LookupError, TypeError, AttributeError):  # of another form: the trainer says what is wrong in the file
        return None


def _parameters(file: Path, bits: int | None) -> int:
    """The parameters in a file of safetensors. 0 for a file that is none. `bits`: see `_bits`."""
    try:
        _, tensors = header_of(file, _LONGEST_HEADER)
    except (OSError, DoesNotFit):
        return 0
    return sum(math.prod(shape) * _parameters_of_element(name, bits) for name, (_, shape, _) in tensors.items())


def _parameters_of_element(name: str, bits: int | None) -> int:
    """For how many parameters one element of a stored tensor stands."""
    if bits is None:
        return 1
    if name.endswith(_PACKED):
        return 32 // bits
    if name.endswith(_BLOCKS):
        return 2
    return 0 if name.endswith(_FACTORS) else 1


@dataclass(frozen=True)
class VllmUse:
    """What a vLLM on a CPU takes in use beside what it takes when ready, in bytes: `slot` of an adapter, and
    `adapter` of each of the `kept` ones; `cache` for all tokens together and `token` of it for each; `batch` tokens are
    computed at once."""

    model: dict[str, Any]
    slot: float
    adapter: float
    slots: int
    kept: int
    cache: float
    token: float
    batch: int
    sequences: int

    def computing(self, tokens: int, sequences: int) -> float:
        """While `tokens` tokens of prompts are computed at once, and the next ones of `sequences` sequences sampled."""
        logits = LOGITS_COPIES * FLOAT_BYTES * sequences * (self.model.get("vocab_size") or 0)
        return max(batch_bytes(self.model, tokens), logits)

    def scoring(self, tokens: int) -> float:
        """While a prompt of `tokens` tokens is scored, its logits by parts."""
        logits = FLOAT_BYTES * tokens * LOGITS_COPIES * (self.model.get("vocab_size") or 0)
        return batch_bytes(self.model, tokens) + min(SCORES_BYTES, logits)

    @property
    def adapters(self) -> float:
        return self.slots * self.slot + self.kept * self.adapter

    @property
    def most(self) -> float:
        """With all adapters and all of the cache in use."""
        return self.adapters + self.cache + self.computing(self.batch, self.sequences)

    @property
    def reason(self) -> str:
        """What decides the largest use."""
        parts = {
            f"{self.kept} adapters and {self.slots} slots": self.adapters,
            "a full cache": self.cache,
            f"a batch of {self.batch:,} tokens": batch_bytes(self.model, self.batch),
            f"the logits of {self.sequences} sequences": self.computing(0, self.sequences),
        }
        return f"mostly {max(parts, key=parts.__getitem__)}"


@dataclass(frozen=True)
class Need:
    """The bytes that one base model needs on a CPU. `trainer` and `vllms`: when it is ready. `weights` are those of
    trainer and vLLMs that are weights. `passing`: None where passes are not estimated, or nothing is trained. `use`: of
    each of `engines` vLLMs."""

    name: str
    trainer: float
    vllms: float
    weights: float
    passing: Passing | None
    use: VllmUse
    engines: int

    @property
    def total(self) -> float:
        return self.trainer + self.vllms

    @property
    def sentence(self) -> str:
        parts = {"trainer": self.trainer, "vLLM": self.vllms}
        return f"{self.name} {gb(self.total)} ({', '.join(f'{name} {gb(b)}' for name, b in parts.items() if b)})"

    def peak(self, free: float) -> tuple[float, str]:
        """The bytes at most, and what decides them. `free`: what the host has left when all is ready."""
        vllms = self.vllms + self.engines * self.use.most
        parts = [f"vLLM {gb(vllms)}, {self.use.reason}"] if self.engines else []
        trainer = self.trainer
        if self.passing is not None:
            more, why = self.passing.worst(free)
            trainer += more
            parts.insert(0, f"trainer {gb(trainer)} {why}")
        elif trainer:
            parts.insert(0, f"trainer {gb(trainer)} without its passes, which are not estimated")
        return trainer + vllms, f"{self.name} {gb(trainer + vllms)} ({'; '.join(parts)})"


def need_of(config: ServerConfig, size: Size) -> Need:
    """What the base model of `config` needs on a CPU."""
    model = model_config(config.base_model_path)
    quantization = quantization_of(whole_config(config.base_model_path))
    inference, trainer = config.backend_config.inference, config.backend_config.trainer
    length = context_length(config, cuda=False)
    assert length is not None
    float32 = cpu_options(model, quantization, length, inference.max_num_seqs)[0]["dtype"] == "float32"
    width = 4 if float32 else 2
    served = size.file_bytes if quantization else width * size.parameters
    processes = VLLM_BYTES + TOKEN_BYTES * (model.get("vocab_size") or 0) + min(VLLM_LOADING_BYTES, served / 2)
    vllms = inference.num_engines if config.modes.manages_inference else 0
    frozen = size.file_bytes if quantization and trainer.keep_quantized else FLOAT_BYTES * size.parameters
    trained = FULL_BYTES * size.parameters if config.full_finetuning else frozen
    ranks = trainer.placement.ranks if config.modes.trains else 0
    lora = config.backend_config.lora
    numbers = 0 if config.full_finetuning else width * lora.max_lora_rank
    cache = kv_cache_bytes(model, length, inference.max_num_seqs)
    return Need(
        config.served_names[0],
        ranks * (RANK_BYTES + min(RANK_LOADING_BYTES, trained / 4)) + (trained if ranks else 0),
        vllms * (processes + served + width * packed_numbers(model)),
        vllms * served + (trained if ranks else 0),
        _passing(config, model, frozen, length) if ranks == 1 and not config.full_finetuning else None,
        VllmUse(
            model,
            slot=numbers * slot_features(model),
            adapter=numbers * adapter_features(model),
            slots=lora.slots,
            kept=kept_adapters(model, lora),
            cache=cache,
            token=token_bytes(model),
            batch=max(BATCH, length),
            sequences=inference.max_num_seqs,
        ),
        vllms,
    )


def _passing(config: ServerConfig, model: dict[str, Any], base_model: float, longest: int) -> Passing | None:
    widths = Widths.of(model)
    if widths is None or not Path("/proc/meminfo").exists():
        return None
    given, rank = config.backend_config.trainer.micro_batch_tokens, config.backend_config.lora.max_lora_rank
    return Passing.of(widths, rank, limit_bytes() - base_model, given, longest)


def packed_numbers(model: dict[str, Any]) -> int:
    """The numbers that vLLM on a CPU has twice: of the embedding and of the output layer. 0 where config.json lacks a
    size."""
    matrices = 1 if model.get("tie_word_embeddings") else 2
    return matrices * (model.get("vocab_size") or 0) * (model.get("hidden_size") or 0)


def token_bytes(model: dict[str, Any]) -> float:
    """Bytes of a token in the key-value cache of a dense model; 0 for another one."""
    widths = Widths.of(model)
    return 0.0 if widths is None else float(2 * FLOAT_BYTES * widths.layers * widths.keys)


def server_bytes(config: ServerConfig) -> float:
    """Of the processes beside trainer and vLLMs."""
    return LAUNCHER_BYTES + config.api_processes * API_BYTES


def gb(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.1f} GB" if size < 100e9 else f"{size / 1e9:.0f} GB"


def check_memory(base_models: Sequence[tuple[ServerConfig, Sequence[str]]]) -> None:
    """Log in one sentence what fits on this machine, as a warning if it is too much. `base_models` with the GPUs that
    each may use. Raises ConfigError when it is clearly impossible. Nothing is known of the nodes of a Ray cluster."""
    here = [(config, devices) for config, devices in base_models if config.ray in (None, "local")]
    on_gpus = [(config, devices) for config, devices in here if devices]
    if on_gpus:
        if all(config.ray is None for config, _ in on_gpus):
            _check_gpus(on_gpus)
        return
    fits, sentence = memory_sentence([config for config, _ in here])
    if sentence:
        logger.log(logging.INFO if fits else logging.WARNING, "%s", sentence)


def memory_sentence(base_models: Sequence[ServerConfig]) -> tuple[bool, str]:
    """Whether these base models fit into the free memory of this machine's CPU, and a sentence about it; empty if they
    need none here, or if this system has no /proc. Raises ConfigError when their weights alone are more than all
    memory."""
    if not Path("/proc/meminfo").exists():
        return True, ""
    needs: list[Need] = []
    unknown: list[str] = []
    for config in base_models:
        if not (config.modes.trains or config.modes.manages_inference):
            continue
        size = size_of(config.base_model_path)
        if size is None:
            unknown.append(config.served_names[0])
        else:
            needs.append(need_of(config, size))
    if not needs:
        return True, ""
    server = server_bytes(base_models[0])
    weights, total = sum(need.weights for need in needs), server + sum(need.total for need in needs)
    each = ", ".join([*(need.sentence for need in needs), f"launcher and API {gb(server)}"])
    if weights > host_bytes():
        raise ConfigError(
            f"base_models: the weights alone take {gb(weights)} ({each}), and this machine has {gb(host_bytes())} of "
            "memory: leave out a base model, or have another server sample it (external_inference_url)"
        )
    free = free_host_bytes()
    peaks = [need.peak(max(0.0, free - total)) for need in needs]
    most = server + sum(size for size, _ in peaks)
    fits = total <= free
    verdict = "which fits" if fits else "which may be too little"
    if fits and free < most:
        verdict = "which fits, and may be too little if all is in use at once"
    uncounted = f"; not counted: {', '.join(unknown)}, whose files are not here yet" if unknown else ""
    return fits, (
        f"memory: about {gb(total)} when ready, for {each}; up to {gb(most)} in use, for "
        f"{', '.join(text for _, text in peaks)}; {gb(free)} are available, {verdict}{uncounted}"
    )


def _check_gpus(base_models: Sequence[tuple[ServerConfig, Sequence[str]]]) -> None:
    """Raises ConfigError when vLLMs would take more than all memory of a GPU that they share."""
    taken: dict[str, dict[str, float]] = defaultdict(dict)
    for config, devices in base_models:
        if not config.modes.manages_inference:
            continue
        fraction = config.backend_config.inference.gpu_memory_utilization
        for replica in inference_devices(config, devices, has_trainer=config.modes.trains):
            for device in replica:
                name = config.served_names[0]
                taken[device][name] = taken[device].get(name, 0.0) + fraction
    for device, by_name in taken.items():
        shares = ", ".join(f"{name} {fraction:g}" for name, fraction in by_name.items())
        if len(by_name) > 1 and sum(by_name.values()) > 1:
            raise ConfigError(
                f"base_models: the vLLMs on GPU {device} take more than its memory ({shares}): give them other "
                "devices, or lower generator.inference_engine.gpu_memory_utilization"
            )
        logger.info("memory of GPU %s: vLLM takes %s of it", device, shares)
