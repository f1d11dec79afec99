"""Which parsers vLLM needs to read a base model's calls of tools and its thoughts.

A model writes both as text, in the format of its chat template. vLLM turns that text into `tool_calls` and `reasoning`
with a parser for each format, which it does not choose itself. Families have several formats over the years, so a row
names the kinds of models and a text that the template has. A model that no row fits has no parser. Cohere's models have
none, because their parsers need a package that vLLM does not install. `tests/unit/inference/test_released_parsers.py`
holds each row against the released templates.

Knows the names of vLLM 0.32. Reads files of the model on this machine; imports neither vLLM nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from skyrl.base.model_files import template_of, whole_config

WRITTEN_THOUGHTS = "skyrl_written_thoughts"
"""The parser of vLLM's plugin for models that write `<think>` themselves, and may do without."""
ONE_LLAMA_CALL = "skyrl_one_llama_call"
"""`llama3_json` for templates that refuse a message with several calls, as those of Llama 3.1 to 3.3."""
_ANY = ("",)
_QWEN = ("qwen2", "qwen3")
_LLAMA = ("llama", "mistral", "smollm3")
_KIMI = ("kimi_k2", "kimi_linear")
_GLM = ("glm4_moe", "glm4v_moe", "glm46v", "glm_moe_dsa", "glm5_next")
_STEP = ("step3p5", "step3p7")
_TOOLS = re.compile(r"tools\b|\btool_calls\b")
"""SmolLM3's template says `xml_tools`, and DeepSeek-V3.1's shows no tools, but calls."""
_DEEPSEEK_CALLS = "tool\u2581calls\u2581begin"
_DEEPSEEK = ("deepseek_v3", "llama", "qwen2")
"""DeepSeek-R1 is also distilled into models of the last two kinds, and QwQ, of the last, ends its thoughts alike."""


class Format(NamedTuple):
    """One format. `kinds` are beginnings of `model_type` in config.json; the template has all `marks`. `parser` is None
    if vLLM has none that reads it."""

    kinds: tuple[str, ...]
    marks: tuple[str, ...]
    parser: str | None


CALLS = (
    Format((*_QWEN, "nemotron_h", "granite"), ("<function=",), "qwen3_coder"),
    Format(_STEP, ("<function=",), "step3p5"),
    Format(("mimo_v2",), ("<function=",), "mimo"),
    Format(("deepseek_v3",), ("function call", "message_sep"), "gigachat3"),
    Format(_DEEPSEEK, (_DEEPSEEK_CALLS, "```json"), "deepseek_v3"),
    Format(_DEEPSEEK, (_DEEPSEEK_CALLS,), "deepseek_v31"),
    Format(_ANY, ("<function name=", "<param name="), "minicpm5"),
    Format((*_QWEN, *_LLAMA), ("<tool_call>",), "hermes"),
    Format(("llama",), ("<function=",), None),  # functionary 3.1
    Format(("llama4",), ("[func_name1(",), "llama4_pythonic"),
    Format(("llama", "mllama"), ("ipython", "only supports single tool-calls"), ONE_LLAMA_CALL),
    Format(("llama4",), ("ipython",), "llama4_json"),
    Format(("llama", "mllama"), ("[func_name1(",), "pythonic"),
    Format(("llama", "mllama"), ("ipython",), "llama3_json"),
    Format(("mistral", "ministral", "mixtral"), ("[TOOL_CALLS]",), "mistral"),
    Format(_KIMI, ("<|tool_calls_section_begin|>",), "kimi_k2"),
    Format(("gpt_oss",), ("<|channel|>",), "openai"),
    Format(_GLM, ("<arg_key>",), "glm47"),
    Format(("bailing",), ("<arg_key>",), "ling3"),
    Format(("laguna",), ("<arg_key>",), "poolside_v1"),
    Format(("hy_v3",), ("toolcall_begin_token",), "hy_v3"),
    Format(("minimax_m2",), ("<minimax:tool_call>",), "minimax_m2"),
    Format(("minimax_m3",), ("]<]minimax[>[",), "minimax_m3"),
    Format(("olmo3",), ("<function_calls>",), "olmo3"),
    Format(("phi3",), ("<|tool|>",), "phi4_mini_json"),
    Format(("granite",), ("<tool_call>",), "granite4"),
    Format(("granite",), ("<|tool_call|>",), "granite"),
    Format(("gemma3",), ("<start_function_call>",), "functiongemma"),
    Format(("gemma4",), ("<|tool_call>",), "gemma4"),
    Format(("seed_oss",), ("<seed:tool_call>",), "seed_oss"),
    Format(("hunyuan_v1_moe",), ("<tool_calls>",), "hunyuan_a13b"),
    Format(("ernie4_5",), ("<tool_call>",), "ernie45"),
    Format(("lfm2",), ("<|tool_call_start|>",), "lfm2"),
    Format(("lfm2",), ("<|tool_list_start|>",), "lfm2"),
    Format(("lfm2",), ("List of tools: [",), "lfm2"),
    Format(("apertus",), ("<|tools_prefix|>",), "apertus"),
    Format(("longcat_flash",), ("<longcat_tool_call>",), "longcat"),
    Format(("jamba",), ("<tool_calls>",), "jamba"),
    Format(("muse_glimmer",), ("<atem:function_calls>",), "muse_glimmer"),
)
"""Of calls. The first row that fits is taken."""
THOUGHTS = (
    Format(("qwen3",), ("<think>",), "qwen3"),
    Format(("qwen2_5_vl",), ("You are MiMo",), WRITTEN_THOUGHTS),
    Format(_ANY, ("<function name=", "<think>"), WRITTEN_THOUGHTS),
    Format(_LLAMA, ("<think>", "enable_thinking"), WRITTEN_THOUGHTS),
    Format(("lfm2",), ("</think>",), WRITTEN_THOUGHTS),
    Format(("deepseek_v3",), ("thinking is defined", "</think>"), "deepseek_v3"),
    Format(_DEEPSEEK, ("</think>",), "deepseek_r1"),
    Format(("nemotron_h",), ("<think>",), "nemotron_v3"),
    Format(_STEP, ("<think>",), "step3p5"),
    Format(("mimo_v2",), ("<think>",), "mimo"),
    Format(("mistral", "ministral"), ("[THINK]",), "mistral"),
    Format(_KIMI, ("<think>",), "kimi_k2"),
    Format(("gpt_oss",), ("<|channel|>",), "openai_gptoss"),
    Format(_GLM, ("<think>",), "glm47"),
    Format(("bailing",), ("<arg_key>", "<think>"), "ling3"),
    Format(("laguna",), ("<think>",), "poolside_v1"),
    Format(("hy_v3",), ("think_begin_token",), "hy_v3"),
    Format(("minimax_m2",), ("<think>",), "minimax_m2"),
    Format(("minimax_m3",), ("<mm:think>",), "minimax_m3"),
    Format(("olmo3",), ("<think>",), "olmo3"),
    Format(("granite",), ("<function=", "<think>"), "granite_thinking_parser"),
    Format(("granite",), ("Here is my thought process:",), "granite"),
    Format(("gemma4",), ("<|channel>",), "gemma4"),
    Format(("seed_oss",), ("<seed:think>",), "seed_oss"),
    Format(("hunyuan_v1_moe",), ("<think>",), "hunyuan_a13b"),
    Format(("ernie4_5",), ("<think>",), "ernie45"),
    Format(("muse_glimmer",), ("to=self<|message|>",), "muse_glimmer"),
)
"""Of thoughts, likewise. vLLM's parsers of thoughts take an answer without their end for thoughts, so there is none for
models whose template has no thoughts, such as Qwen3-Instruct-2507."""
RENDERED_BY_VLLM = {
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "deepseek_v41": ("deepseek_v41", "deepseek_v41"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "inkling_mm_model": ("inkling", "inkling"),
    "inkling2": ("inkling", "inkling"),
}
"""The parsers of calls and of thoughts for each `model_type` whose chats vLLM renders with code of its own. A template
says nothing about these, and some of their models have none."""


def parser_options(base_model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of vLLM's three options for parsers; None for one that it does not get. `given` are the operator's
    options, which win; false and None switch a parser off."""
    calls, thoughts = parsers_of(whole_config(base_model).get("model_type", ""), template_of(base_model) or "")
    tools = given.get("tool_call_parser", calls) or None
    automatic = bool(given.get("enable_auto_tool_choice", tools))
    return {
        "enable_auto_tool_choice": automatic or None,
        "tool_call_parser": tools if automatic else None,
        "reasoning_parser": given.get("reasoning_parser", thoughts) or None,
    }


def parsers_of(kind: str, template: str) -> tuple[str | None, str | None]:
    """The parsers of calls and of thoughts, each None if there is none. `kind` is the `model_type` of config.json,
    `template` the text of the chat template. A template without tools and calls needs no parser of calls: its models
    are not asked to call."""
    if kind in RENDERED_BY_VLLM:
        return RENDERED_BY_VLLM[kind]
    calls = _first(CALLS, kind, template) if _TOOLS.search(template) else None
    return calls, _first(THOUGHTS, kind, template)


def _first(formats: Sequence[Format], kind: str, template: str) -> str | None:
    fitting = (
        each.parser for each in formats if kind.startswith(each.kinds) and all(mark in template for mark in each.marks)
    )
    return next(fitting, None)
