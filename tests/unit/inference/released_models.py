"""Released chat templates and what reads the answers of their models, and the models of the cookbook.

Read by `test_released_parsers.py`, which tries each one, and by the page docs/reference/parsers.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl.inference.parsers import ONE_LLAMA_CALL, WRITTEN_THOUGHTS

THINKS = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
"""What makes one template or another think."""

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin")
)
KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
HY = tuple(
    f"<{slash}{name}:opensource>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_sep")
    for slash in ("", "/")
)
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_NEW = (*MISTRAL, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
MINICPM = ("<function", "</function>", "<param", "</param>")


def functions(calls: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


def lfm(calls: Sequence[tuple[str, Any]]) -> str:
    return f"<|tool_call_start|>[{functions(calls)}]<|tool_call_end|>"


def granite(calls: Sequence[tuple[str, Any]]) -> str:
    return "<|tool_call|>" + json.dumps([{"name": name, "arguments": given} for name, given in calls])


def kimi(calls: Sequence[tuple[str, Any]]) -> str:
    inner = "".join(
        f"{KIMI[2]}functions.{name}:{number}{KIMI[4]}{json.dumps(given)}{KIMI[3]}"
        for number, (name, given) in enumerate(calls)
    )
    return f"{KIMI[0]}{inner}{KIMI[1]}"


def deepseek(calls: Sequence[tuple[str, Any]]) -> str:
    inner = "\n".join(
        f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{name}\n```json\n{json.dumps(given)}\n```{DEEPSEEK[3]}"
        for name, given in calls
    )
    return f"{DEEPSEEK[0]}{inner}{DEEPSEEK[1]}"


@dataclass(frozen=True)
class Model:
    """A released template. `kind` is the `model_type` of its models, `markers` are tokens of theirs. `arguments` are
    those of the template."""

    kind: str
    calls: str | None
    thoughts: str | None = None
    markers: tuple[str, ...] = ()
    arguments: Mapping[str, Any] | None = None
    written: str | None = None
    """How the model writes thoughts (`{}`), where the template leaves those of an answer out."""
    writes: Callable[[Sequence[tuple[str, Any]]], str] | None = None
    """How the model writes calls, where the template leaves them out, or fails on them in vLLM."""
    most: int = 2
    """Calls in one answer."""
    keeps_text: bool = True
    """Whether the text beside calls is read back: False if the template leaves it out or writes it behind the calls."""
    read: bool = True
    """Whether there is something to read here."""


NONE = Model("", None, read=False)
"""vLLM has no parser, or the template has neither calls nor thoughts."""
LAGUNA = Model("laguna", "poolside_v1", "poolside_v1", (*THINK, *CALL, *PAIRS, "<assistant>"), THINKS)
GEMMA_4 = Model("gemma4", "gemma4", "gemma4", GEMMA, THINKS, "<|channel>thought\n{}<channel|>", keeps_text=False)
GRANITE_4 = Model("granitemoehybrid", "granite4", None, CALL)
LLAMA = Model("llama", ONE_LLAMA_CALL, None, ("<|python_tag|>",), most=1, keeps_text=False)
HERMES = Model("llama", "hermes", None, CALL, keeps_text=False)
R1 = Model("qwen2", "deepseek_v3", "deepseek_r1", (*THINK, *DEEPSEEK), THINKS, "{}\n</think>\n\n", keeps_text=False)
MODELS: Mapping[str, Model] = {
    "Apertus-8B-Instruct": Model("apertus", "apertus", None, ("<|tools_prefix|>", "<|tools_suffix|>")),
    "Apriel-1.6-15b-Thinker-fixed": NONE,
    "Bielik-11B-v3.0-Instruct": Model("llama", "hermes", WRITTEN_THOUGHTS, (*THINK, *CALL), THINKS),
    "ByteDance-Seed-OSS": Model(
        "seed_oss",
        "seed_oss",
        "seed_oss",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    "Cohere2MoE": Model("cohere2_moe", None, read=False),
    "CohereForAI-c4ai-command-r-plus-tool_use": Model("cohere", None, read=False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Model("cohere2", None, read=False),
    "GLM-4.6": Model("glm4_moe", "glm47", "glm47", (*THINK, *CALL, *PAIRS)),
    "GLM-4.7-Flash": Model("glm4_moe_lite", "glm47", "glm47", (*THINK, *CALL, *PAIRS)),
    "GigaChat3-10B-A1.8B": Model("deepseek_v3", "gigachat3", None, ("<|role_sep|>", "<|message_sep|>"), most=1),
    "GigaChat3.1-10B-A1.8B": Model("deepseek_v3", "gigachat3", None, ("<|role_sep|>", "<|function_call|>"), most=1),
    "HuggingFaceTB-SmolLM3-3B": Model(
        "smollm3", None, WRITTEN_THOUGHTS, THINK, None, "<think>\n{}\n</think>\n", most=0
    ),
    "Kimi-K2-Instruct": Model("kimi_k2", "kimi_k2", None, KIMI, writes=kimi),
    "Kimi-K2-Thinking": Model("kimi_k2", "kimi_k2", "kimi_k2", (*THINK, *KIMI), None, "<think>{}</think>", kimi),
    "Kimi-K3": Model("kimi_k3", "kimi_k3", "kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    "LFM2-8B-A1B": Model("lfm2_moe", "lfm2", None, ("<|tool_call_start|>", "<|tool_call_end|>"), writes=lfm),
    "LFM2.5-8B-A1B": Model(
        "lfm2_moe",
        "lfm2",
        WRITTEN_THOUGHTS,
        (*THINK, "<|tool_call_start|>", "<|tool_call_end|>"),
        None,
        "<think>{}</think>",
    ),
    "LFM2.5-Instruct": Model(
        "lfm2",
        "lfm2",
        WRITTEN_THOUGHTS,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        None,
        "<think>{}</think>",
        lfm,
    ),
    "MiMo-VL": Model("qwen2_5_vl", "hermes", WRITTEN_THOUGHTS, CALL, None, "<think>\n{}\n</think>\n"),
    "MiniMax-M1": Model("minimax_m1", None, read=False),
    "MiniMax-M2": Model(
        "minimax_m2", "minimax_m2", "minimax_m2", (*THINK, "<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "MiniMax-M3": Model("minimax_m3_vl", "minimax_m3", "minimax_m3", ("<mm:think>", "</mm:think>", "]<]minimax[>[")),
    "Mistral-Small-3.2-24B-Instruct-2506": Model("mistral3", "mistral", None, MISTRAL_NEW[:-2], keeps_text=False),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Model("nemotron_h", "qwen3_coder", "nemotron_v3", (*THINK, *CALL)),
    "NVIDIA-Nemotron-Nano-v2": Model("nemotron_h", None, "nemotron_v3", THINK, None, "{}\n</think>\n", most=0),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-QwQ-32B": Model("qwen2", "hermes", "deepseek_r1", (*THINK, *CALL), THINKS, "{}\n</think>\n\n"),
    "Qwen-Qwen2.5-7B-Instruct": Model("qwen2", "hermes", None, CALL),
    "Qwen-Qwen3-0.6B": Model("qwen3", "hermes", "qwen3", (*THINK, *CALL)),
    "Qwen3-Coder": Model("qwen3_moe", "qwen3_coder", None, CALL),
    "Qwen3.5-4B": Model("qwen3_5", "qwen3_coder", "qwen3", (*THINK, *CALL)),
    "Reka-Edge": NONE,
    "Spark2.5": NONE,
    "StepFun3.5-Flash": Model("step3p5", "step3p5", "step3p5", (*THINK, *CALL)),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Model(
        "llama", "deepseek_v3", "deepseek_r1", (*THINK, *DEEPSEEK), None, "{}\n</think>\n\n", deepseek
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": R1,
    "deepseek-ai-DeepSeek-V3.1": Model(
        "deepseek_v3", "deepseek_v31", "deepseek_v3", (*THINK, *DEEPSEEK), THINKS, "{}</think>"
    ),
    "deepseek-ai-DeepSeek-V3.2": Model("deepseek_v32", "deepseek_v32", "deepseek_v3", read=False),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Model("deepseek_v4", "deepseek_v4", "deepseek_v4", read=False),
    "deepseek-ai-DeepSeek-V4": Model("deepseek_v4", "deepseek_v4", "deepseek_v4", read=False),
    "fireworks-ai-llama-3-firefunction-v2": Model("llama", None, read=False),
    "google-gemma-2-2b-it": Model("gemma2", None, read=False),
    "google-gemma-4-31B-it-interleaved": GEMMA_4,
    "google-gemma-4-31B-it": GEMMA_4,
    "ibm-granite-granite-3.3-2B-Instruct": Model("granite", "granite", None, ("<|tool_call|>",), writes=granite),
    "ibm-granite-granite-4.0": GRANITE_4,
    "ibm-granite-granite-4.1": GRANITE_4,
    "inclusionai-ling-3.0-flash": Model("bailing_hybrid", "ling3", "ling3", (*THINK, *CALL, *PAIRS), THINKS),
    "llama-cpp-deepseek-r1": Model("deepseek_v3", "deepseek_v3", "deepseek_r1", read=False),
    "llama-cpp-rwkv-world": NONE,
    "meetkai-functionary-medium-v3.1": Model("llama", None, read=False),
    "meetkai-functionary-medium-v3.2": Model("llama", None, read=False),
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "microsoft-Phi-3.5-mini-instruct": Model("phi3", None, read=False),
    "mistralai-Ministral-3-14B-Reasoning-2512": Model(
        "mistral3", "mistral", "mistral", MISTRAL_NEW, None, "[THINK]{}[/THINK]"
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Model("mistral", "mistral", None, MISTRAL, keeps_text=False),
    "moonshotai-Kimi-K2": Model("kimi_k2", "kimi_k2", None, KIMI),
    "muse-glimmer": Model(
        "muse_glimmer", "muse_glimmer", "muse_glimmer", ("<|start|>", "<|message|>", "<|eom|>"), keeps_text=False
    ),
    "openai-gpt-oss-120b": Model("gpt_oss", "openai", "openai_gptoss", read=False),
    "openbmb-MiniCPM5-1B": Model("llama", "minicpm5", WRITTEN_THOUGHTS, (*THINK, *MINICPM), keeps_text=False),
    "poolside-Laguna-S-2.1": LAGUNA,
    "poolside-Laguna-XS-2.1": LAGUNA,
    "poolside-Laguna-XS.2": LAGUNA,
    "tencent-Hy3": Model("hy_v3", "hy_v3", "hy_v3", HY, THINKS),
    "unsloth-Apriel-1.5": NONE,
    "unsloth-mistral-Devstral-Small-2507": Model("mistral", "mistral", None, MISTRAL_NEW[:-2]),
    "upstage-Solar-Open-100B": Model("solar_open", None, read=False),
}
"""Apriel, Reka Edge, Spark and RWKV are no architectures of vLLM 0.32. gpt-oss is read with OpenAI's own vocabulary,
which is fetched, and the templates of DeepSeek-V3.2 and -V4 are not what vLLM renders."""


LLAMA_31, QWEN3, QWEN35 = "meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B"
NEMOTRON, KIMI_K2 = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Kimi-K2-Thinking"
COOKBOOK: Mapping[str, str | tuple[str | None, str | None] | None] = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_31,
    "meta-llama/Llama-3.2-1B": None,
    "meta-llama/Llama-3.2-3B": None,
    "meta-llama/Llama-3.1-8B": None,
    "meta-llama/Llama-3.1-70B": None,
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama-Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("hermes", None),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": ("hermes", None),
    "Qwen/Qwen3-8B-Base": ("hermes", "qwen3"),
    "Qwen/Qwen3-30B-A3B-Base": ("hermes", "qwen3"),
    "Qwen/Qwen3-8B": QWEN3,
    "Qwen/Qwen3-32B": QWEN3,
    "Qwen/Qwen3-30B-A3B": QWEN3,
    "Qwen/Qwen3-4B-Instruct-2507": ("hermes", None),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("hermes", None),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ("hermes", None),
    "Qwen/Qwen3.5-4B": QWEN35,
    "Qwen/Qwen3.5-9B": QWEN35,
    "Qwen/Qwen3.5-9B-Base": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3.5-27B": QWEN35,
    "Qwen/Qwen3.5-35B-A3B": QWEN35,
    "Qwen/Qwen3.5-35B-A3B-Base": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3.5-397B-A17B": QWEN35,
    "Qwen/Qwen3.6-27B": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3.6-35B-A3B": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3.8-27B": ("qwen3_coder", "qwen3"),
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.1-Base": ("deepseek_v31", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V4.1-Flash": ("deepseek_v41", "deepseek_v41"),
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": ("deepseek_v41", "deepseek_v41"),
    "openai/gpt-oss-20b": "openai-gpt-oss-120b",
    "openai/gpt-oss-120b": "openai-gpt-oss-120b",
    "moonshotai/Kimi-K2-Thinking": KIMI_K2,
    "moonshotai/Kimi-K2.5": ("kimi_k2", "kimi_k2"),
    "moonshotai/Kimi-K2.6": ("kimi_k2", "kimi_k2"),
    "moonshotai/Kimi-K3.1-Pro": ("kimi_k3", "kimi_k3"),
    "zai-org/GLM-5.3": ("glm47", "glm47"),
    "zai-org/GLM-5.3-Flash": ("glm47", "glm47"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": ("qwen3_coder", "nemotron_v3"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("qwen3_coder", "nemotron_v3"),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": ("qwen3_coder", "nemotron_v3"),
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": ("qwen3_coder", "nemotron_v3"),
    "thinkingmachines/Inkling": ("inkling", "inkling"),
    "thinkingmachines/Inkling-Small": ("inkling", "inkling"),
    "thinkingmachines/Inkling-2-Small": ("inkling", "inkling"),
}
"""The template of each model; the parsers of calls and thoughts if its template was not at hand; None if it is released
without one."""
