"""Base models that packed rows or adapters cannot serve are refused at start-up, with what is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_lora_support import make_backend
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.inference.model_options import CPU_LORA_TARGETS
from skyrl.trainer.attention.packed_attention import AttentionCall
from skyrl.trainer.model.logprobs import LogitTransform
from skyrl.trainer.model.packed_model import ATTENTION, MLP, UNEMBED
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.architectures.figures import record
from tests.families import make_family, save_random
from tests.local_ranks import rank_of

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
AXK2: dict[str, Any] = {
    "model_type": "axk2",
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "mlp_layer_types": ["dense", "dense"],
}
"""Its attention is sparse beyond 2,048 tokens."""
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense"],
    "dense_intermediate_size": 16,
    "index_n_heads": 1,
    "index_head_dim": 8,
}
QWEN4: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "layer_types": ["linear_attention", "indexed_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "hc_lowrank": 4,
    "indexer_n_heads": 1,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 32,
    "split_ngram_parts": 1,
    "eos_token_id": 1,
}
LLAMA_4: dict[str, Any] = {
    "model_type": "llama4_text",
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 16,
    "num_local_experts": 2,
}
FALCON: dict[str, Any] = {"model_type": "falcon", "alibi": True, "head_dim": None}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "olmoe": (
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
        r"OlmoeForCausalLM.*: model.layers.0.mlp is a mixture of experts of a kind that cannot be trained",
    ),
    "gpt-neox": (
        {"model_type": "gpt_neox"},
        r"GPTNeoXForCausalLM.*: the projections of gpt_neox.layers.0 .* attention.query_key_value \(Linear\)",
    ),
    "glm-4": (
        {"model_type": "glm4"},
        r"Glm4ForCausalLM.*: the projections of model.layers.0 .* mlp.gate_up_proj \(Linear\)",
    ),
    "starcoder2": (
        {"model_type": "starcoder2"},
        r"Starcoder2.*: the projections of model.layers.0 .* mlp.c_fc \(Linear\)",
    ),
    "falcon": (FALCON, r"FalconForCausalLM.*: no linear layers of a known name found"),
    "minimax-m3": (
        MINIMAX_M3,
        r"\(minimax_m3_vl_text\) has sparse attention to the 16 blocks of 128 tokens that an indexer chooses",
    ),
    "qwen4": (
        QWEN4,
        r"\(qwen4_exp_text\) has sparse attention to the 8 tokens whose blocks an indexer chooses \(indexer_budget\) "
        r"and embeddings of n-grams with a convolution over them \(ple_layer_ids\), which is not supported",
    ),
    "llama-4": (
        LLAMA_4,
        r"\(llama4_text\) has attention in chunks of 8 tokens \(attention_chunk_size\) and experts whose inputs are "
        "weighed in place of their results, which is not supported",
    ),
    "ax-k2": (AXK2, r"\(axk2\) has sparse attention to the 2048 tokens .*, of another kind than deepseek_v32, glm_moe"),
    "stablelm": ({"model_type": "stablelm"}, "the model does not pass the layout of the rows on to its attention"),
    "phi-3 with longrope": (
        {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
        "longrope position embeddings",
    ),
    "gemma-3 with dynamic rope": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN}},
        "dynamic position embeddings",
    ),
    "gemma-3 for embeddings": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        r"layer 0 \(Gemma3Attention\): the mask is not that of a causal window",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_is_refused_with_what_is_missing(tmp_path: Path, name: str) -> None:
    settings, words = REFUSED[name]
    path = save_random({**SMALL, **settings}, tmp_path / "model")
    with pytest.raises(ConfigError, match=f"^base_model: .*{words}") as refusal:
        LoraBackend(load_config({"base_model": path}))
    record("refused", **{settings["model_type"]: str(refusal.value).removeprefix(f"base_model: {path} ")})


REFUSED_IN_FULL: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": (FALCON, r"FalconForCausalLM.*: its decoder has no list of `layers`"),
    "gpt-2": ({"model_type": "gpt2"}, r"GPT2LMHeadModel.*: its decoder has no list of `layers`"),
    "xglm": (
        {"model_type": "xglm", "d_model": 16, "ffn_dim": 16, "num_layers": 1, "attention_heads": 2},
        "the model computes attention itself, not by transformers' attention interface",
    ),
    "ax-k2": (AXK2, r"\(axk2\) has sparse attention to the 2048 tokens .*, of another kind than deepseek_v32, glm_moe"),
}


@pytest.mark.filterwarnings("ignore:.*causal_conv1d")
@pytest.mark.parametrize("name", REFUSED_IN_FULL)
def test_full_finetuning_refuses_an_architecture_with_what_is_missing(tmp_path: Path, name: str) -> None:
    settings, words = REFUSED_IN_FULL[name]
    path = save_random({**SMALL, **settings}, tmp_path / "model")
    with pytest.raises(ConfigError, match=f"^base_model: .*{words}") as refusal:
        FullBackend(load_config({"base_model": path, "backend_config": {"trainer.full_finetuning": True}}))
    record("refused", **{settings["model_type"]: str(refusal.value).removeprefix(f"base_model: {path} ")})


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("family", ["gemma-2", "granite", "command-r"])
def test_logits_that_the_model_changes_in_an_unknown_way_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, full: bool
) -> None:
    """These models would train with wrong logprobs if the change of their logits were not known."""
    path = make_family(family, tmp_path)
    config = load_config({"base_model": path, "backend_config": {"trainer.full_finetuning": full}})
    backend = FullBackend if full else LoraBackend
    backend(config)
    monkeypatch.setattr(LogitTransform, "of", lambda _: LogitTransform())
    with pytest.raises(ConfigError, match="makes other numbers of its output layer's logits than logit_scale"):
        backend(config)


def test_a_softcap_far_above_all_logits_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released models have a final softcap of 30: it hardly changes the logits of a tiny model."""
    path = save_random({**SMALL, "model_type": "gemma2", "final_logit_softcapping": 30.0}, tmp_path / "model")
    monkeypatch.setattr(LogitTransform, "of", lambda _: LogitTransform())
    with pytest.raises(ConfigError, match="logits than logit_scale"):
        LoraBackend(load_config({"base_model": path}))


def test_a_layer_that_does_not_ask_for_its_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_random({**SMALL, "model_type": "mistral", "sliding_window": 4096}, tmp_path / "model")
    LoraBackend(load_config({"base_model": path}))
    stock = ALL_ATTENTION_FUNCTIONS.get_interface

    def without_window(*args: Any) -> Callable[..., Any]:
        return lambda *given, sliding_window, **kwargs: stock(*args)(*given, **kwargs)

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", without_window)
    with pytest.raises(ConfigError, match=r"layer 0 .* causal attention: token 4096 does not see token 0"):
        LoraBackend(load_config({"base_model": path}))


CHUNKED = chunked_causal_mask_function(512, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("window", "sees", "options", "words"),
    [
        (None, bidirectional_mask_function, (), "token 0 sees token 1;"),
        (None, sliding_window_causal_mask_function(16), (), "token 4095 does not see token 0"),
        (16, causal_mask_function, (), "token 16 sees token 0"),
        (16, sliding_window_causal_mask_function(17), (), "token 16 sees token 0"),
        (16, sliding_window_causal_mask_function(15), (), "token 15 does not see token 0"),
        (None, None, (), "without a causal mask"),
        (None, CHUNKED, (), "does not see"),
        (None, causal_mask_function, ("position_bias",), "layer 0: attention with position_bias is not supported"),
        (None, causal_mask_function, (), None),
        (1, sliding_window_causal_mask_function(1), (), None),
        (7, sliding_window_causal_mask_function(7), (), None),
    ],
)
def test_other_masks_and_options_than_the_packed_rows_are_refused(
    window: int | None, sees: Any, options: tuple[str, ...], words: str | None
) -> None:
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        AttentionCall("layer 0", window, sees, options).check()


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError])
def test_a_model_that_fails_on_packed_rows_is_refused_whatever_it_raises(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> Any:
        raise error("no such rows")

    base = rank_of(make_backend()).base
    for check, part in ((base.check_stock, "attention_calls"), (lambda: base.verify(torch.zeros(1)), "packed_logits")):
        monkeypatch.setattr(base.packed, part, fail)
        with pytest.raises(ConfigError, match=r"base_model: .* cannot run on packed rows: .*no such rows"):
            check()


def test_vllm_on_a_cpu_takes_adapters_on_all_layers_that_are_trained() -> None:
    assert set(CPU_LORA_TARGETS) == {*ATTENTION, *MLP, *UNEMBED}
