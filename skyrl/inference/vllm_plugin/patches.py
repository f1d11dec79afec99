"""Patches of every process of vLLM. `patch_process` is their index.

Knows vLLM's sampling parameters, its models and its layers for adapters. Knows nothing of adapters' files, of their
arithmetic or of platforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import FusedMoE3DWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from skyrl.inference.vllm_plugin import admission, model_runners, prefills, prefix_cache, waits
from skyrl.inference.vllm_plugin.slots import check_sizes

PARSERS = "skyrl.inference.vllm_plugin.parsers"
VLLM_MAX = 2.0
"""The highest temperature that vLLM allows."""


def patch_process() -> None:
    """The patches of each process of vLLM."""
    add_parsers()
    allow_any_temperature()
    prefix_cache.forget_with_weights()
    prefix_cache.share_tails()
    prefills.take_turns()
    admission.keep_headroom()
    waits.count_waits()
    serve_lm_head()
    read_adapters_of_mixtures()
    check_loaded_adapters()
    model_runners.score_prompts_of_first_runner()
    model_runners.score_prompts_of_second_runner()
    model_runners.keep_own_logprobs_of_first_runner()
    model_runners.keep_own_logprobs_of_second_runner()


def add_parsers() -> None:
    """Name the plugin's parsers to vLLM, each of whose processes looks names up by itself."""
    ReasoningParserManager.register_lazy_module("skyrl_written_thoughts", PARSERS, "WrittenThoughts")
    ToolParserManager.register_lazy_module("skyrl_bare_json", PARSERS, "BareJsonToolParser")
    ToolParserManager.register_lazy_module("skyrl_one_llama_call", PARSERS, "OneLlamaCall")
    ToolParserManager.register_lazy_module("mistral", PARSERS, "MistralToolParser")


def allow_any_temperature() -> None:
    """Let vLLM sample at any finite temperature. vLLM's own bound is 2; Tinker has none.

    Only the checks of requests in the API server and in the engine have the bound; the sampler divides by any
    temperature.
    """
    original = SamplingParams._verify_args

    def verify(params: SamplingParams) -> None:
        temperature = params.temperature
        if not VLLM_MAX < temperature < float("inf"):
            return original(params)
        params.temperature = VLLM_MAX
        try:
            original(params)
        finally:
            params.temperature = temperature

    SamplingParams._verify_args = verify  # type: ignore[method-assign]


VLLMS_BOUND = 258048
"""The largest vocabulary that vLLM wraps by itself."""
KERNELS_BOUND = 2**31
"""The most elements of all slots' matrices together that vLLM's kernels for CUDA can address."""


def serve_lm_head() -> None:
    """Serve adapters on lm_head in every architecture of which vLLM computes logits in the usual way.

    vLLM wraps `logits_processor` for such adapters where a model's class names lm_head. Llama and Qwen3 do. Qwen2,
    Mistral and Gemma do not; Gemma 2 and Command have no lm_head, and use the embeddings; and vLLM refuses vocabularies
    above a bound. In all of them vLLM would refuse an adapter with an lm_head part: the SDK's default. The wrapper is
    the same for all. It adds an adapter's part to the logits before they are scaled or soft-capped.
    """
    original = LoRAModelRunnerMixin.load_lora_model

    def load_lora_model(runner: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        add_lm_head(model)
        if (language_model := getattr(model, "language_model", None)) is not None:
            add_lm_head(language_model)  # Gemma 4's does not name it itself
        return original(runner, model, *args, **kwargs)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model  # type: ignore[method-assign]
    _allow_any_vocabulary()


def add_lm_head(model: Any) -> None:
    """Name lm_head among the layers of `model` that adapters may change, where vLLM's wrapper can serve it.

    A model that computes logits with its embeddings gets an lm_head with the same weights, which only tells vLLM where
    the adapter's part belongs."""
    if not isinstance(getattr(model, "logits_processor", None), LogitsProcessor):
        return
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not hasattr(model, "lm_head") and isinstance(embeddings, VocabParallelEmbedding):
        model.lm_head = _tied_to(embeddings)
    if isinstance(getattr(model, "lm_head", None), VocabParallelEmbedding):
        model.embedding_modules = {**getattr(model, "embedding_modules", {}), "lm_head": "output_embeddings"}


def _tied_to(embeddings: Any) -> Any:
    with torch.device("meta"):  # so that no second matrix is allocated
        head = ParallelLMHead(
            embeddings.num_embeddings,
            embeddings.embedding_dim,
            params_dtype=embeddings.weight.dtype,
            org_num_embeddings=embeddings.org_vocab_size,
            padding_size=embeddings.padding_size,
        )
    return head.tie_weights(embeddings)


def _allow_any_vocabulary() -> None:
    """vLLM's bound is older than its kernels: these go through the vocabulary in blocks.

    The kernels for CUDA find a slot's matrix by a 32-bit product. More elements than that are refused: ValueError."""
    original = LogitsProcessorWithLoRA.create_lora_weights

    def create_lora_weights(layer: Any, max_loras: int, lora_config: Any, *args: Any, **kwargs: Any) -> None:
        processor = layer.base_layer
        vocabulary, rank = processor.vocab_size, lora_config.max_lora_rank
        if torch.device(layer.device).type == "cuda" and max_loras * vocabulary * rank > KERNELS_BOUND:
            raise ValueError(
                f"max_loras ({max_loras}) x vocabulary ({vocabulary}) x max_lora_rank ({rank}) is above "
                f"{KERNELS_BOUND}, which vLLM's kernels for adapters on lm_head can address; lower "
                "trainer.policy.model.lora.max_loras or trainer.policy.model.lora.max_lora_rank"
            )
        processor.vocab_size = vocabulary if vocabulary <= VLLMS_BOUND else 0  # so that it allocates nothing
        try:
            original(layer, max_loras, lora_config, *args, **kwargs)
        finally:
            processor.vocab_size = vocabulary
        if vocabulary > VLLMS_BOUND:
            slots, one, _, rank = layer.lora_b_stacked.shape
            dtype = layer.lora_b_stacked.dtype
            # Not new_zeros, which `UntouchedZeros` does not know
            layer.lora_b_stacked = torch.zeros(slots, one, vocabulary, rank, dtype=dtype, device=layer.device)

    LogitsProcessorWithLoRA.create_lora_weights = create_lora_weights  # type: ignore[method-assign]


CLASS, HUNYUAN_3 = "Qwen3_5MoeForCausalLM", "HYV3ForCausalLM"
"""Named, not imported: most servers have another model."""


def read_adapters_of_mixtures() -> None:
    """Read adapters on the experts of Qwen3.5's text model as vLLM reads those of the whole model; and those on
    Hunyuan 3's shared experts by the name that transformers and PEFT give them.

    Releases of Qwen3.5 have the gate and up projections of all experts in one tensor, and PEFT trains this tensor with
    one pair of matrices. vLLM's class of the whole model reads such adapters, its class of the text model alone does
    not.
    """
    original = LRUCacheWorkerLoRAManager.create_lora_manager

    def create_lora_manager(manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if type(model).__name__ == CLASS:
            model.is_3d_moe_weight = True
        if type(model).__name__ == HUNYUAN_3:
            model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".shared_experts.": ".shared_mlp."})
        return original(manager, model, *args, **kwargs)

    LRUCacheWorkerLoRAManager.create_lora_manager = create_lora_manager  # type: ignore[method-assign]


_GATE = "shared_expert_gate"
_LATENT = "kv_b_proj"
_EXPERTS = ".experts"


def check_loaded_adapters() -> None:
    """Refuse adapters that vLLM would load in part, or that would fail in the middle of being loaded.

    vLLM ignores some parts without a word: experts where `lora_target_modules` does not name them, layers that it does
    not know, layers that it multiplies into others or computes outside of their class. Samples would then come from
    other weights than were trained. Other parts raise an error after the adapter has taken a slot.
    """
    original = WorkerLoRAManager._load_adapter

    def load_adapter(manager: Any, lora_request: Any) -> Any:
        adapter = original(manager, lora_request)
        check_adapter(adapter.loras, manager._adapter_manager)
        return adapter

    WorkerLoRAManager._load_adapter = load_adapter  # type: ignore[method-assign]


def check_adapter(parts: Mapping[str, Any], manager: Any) -> None:
    """Raise ValueError for an adapter that vLLM would not serve as a whole. `parts`: each layer's matrices by the name
    that vLLM gives the layer; `manager`: vLLM's, which knows its layers with adapters."""
    fused = {name: [name, f"{name}.base_layer"] for name, module in manager.modules.items() if _is_fused(module)}
    groups = manager.packed_modules | fused
    known = (set(manager.modules) - set(manager.packed_modules)).union(*groups.values())
    for name, part in parts.items():
        if name not in known:
            _check_experts(name, manager)
            if not _is_on_another_device(name, manager.model):
                raise ValueError(f"the adapter changes {name}, which vLLM computes without adapters")
        _check_ignored(name, manager.model)
        matrices, most = part.lora_a.shape[0], manager.lora_config.max_lora_rank
        layer = name.removesuffix(".base_layer")
        rank = matrices // manager.modules[layer].global_num_experts if layer in fused else matrices
        if rank > most:
            raise ValueError(f"the adapter has rank {rank} for {name}, and vLLM keeps room for {most} (max_lora_rank)")
    for name, layer in manager.modules.items():
        check_sizes(layer, manager.packed_modules.get(name, [name]), parts)
    for packed, names in groups.items():
        lacking = [name for name in names if name not in parts]
        if 0 < len(lacking) < len(names) and _needs_all(packed, manager.modules[packed], len(names)):
            raise ValueError(f"the adapter lacks {lacking[0]}: vLLM loads all parts of {packed} or none")


def _check_experts(name: str, manager: Any) -> None:
    """Raise ValueError for a part of experts that has no place in vLLM."""
    layer, found, rest = name.partition(_EXPERTS)
    if not found:
        return
    if f"{layer}{_EXPERTS}" not in manager.modules:
        raise ValueError(
            f"the adapter changes experts ({name}), and vLLM keeps no room for adapters on them: set "
            "trainer.policy.model.lora.train_mlp_of_mixtures to train"
        )
    if rest in ("", ".base_layer"):
        raise ValueError(
            f"the adapter has matrices for all experts of {layer}{_EXPERTS} together, and vLLM reads a pair for each "
            f"expert and projection ({layer}{_EXPERTS}.0.gate_proj)"
        )


def _check_ignored(name: str, model: nn.Module) -> None:
    """Raise ValueError for layers that vLLM wraps for adapters, and whose adapters it then does not apply."""
    parent, _, leaf = name.rpartition(".")
    if leaf == _GATE or (leaf == _LATENT and hasattr(model.get_submodule(parent), "mla_attn")):
        raise ValueError(f"the adapter changes {name}, and vLLM ignores adapters on {leaf}")


def _is_fused(module: Any) -> bool:
    """Experts with one pair of matrices for the gate and up projections of all of them, and one for down."""
    return isinstance(module, FusedMoE3DWithLoRA)


def _needs_all(packed: str, module: Any, parts: int) -> bool:
    """vLLM packs experts only with all their matrices. A layer that has more slices than parts cannot tell which
    slices a lacking part had."""
    return packed.endswith(_EXPERTS) or getattr(module, "n_slices", parts) != parts


def _is_on_another_device(name: str, model: nn.Module) -> bool:
    """With pipeline parallelism a device has some of the layers."""
    module: Any = model
    for attribute in name.split("."):
        module = getattr(module, attribute, None)
        if isinstance(module, PPMissingLayer):
            return True
    return False
