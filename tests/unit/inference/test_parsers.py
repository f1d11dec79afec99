"""Which parsers a base model gets, by its kind and its template's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.parsers import (
    CALLS,
    ONE_LLAMA_CALL,
    RENDERED_BY_VLLM,
    THOUGHTS,
    WRITTEN_THOUGHTS,
    parser_options,
    parsers_of,
)
from skyrl.inference.vllm_command import vllm_spec
from tests.architectures.cookbook import listed, model_type_of
from tests.unit.chat_families import FAMILIES

CALL = "tool\u2581calls\u2581begin"
QWEN3 = "{% if tools %}{{ tools }}<tool_call>{% endif %}<think>"
ENGINE = "generator.inference_engine.engine_init_kwargs"


def write(directory: Path, kind: str, template: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.mark.parametrize(
    ("kind", "marks", "expected"),
    [
        ("qwen2", "<tool_call>", ("hermes", None)),
        ("qwen2", "<tool_call></think>", ("hermes", "deepseek_r1")),
        ("qwen3", "<tool_call><think>", ("hermes", "qwen3")),
        ("qwen3", "<tool_call>", ("hermes", None)),
        ("qwen3_moe", "<tool_call><function=", ("qwen3_coder", None)),
        ("qwen3_5_moe", "<tool_call><function=<think>", ("qwen3_coder", "qwen3")),
        ("qwen3_next", "<tool_call>", ("hermes", None)),
        ("llama", "ipython", ("llama3_json", None)),
        ("llama", "ipython[func_name1(params_name1=1)]", ("pythonic", None)),
        ("mllama", "ipython", ("llama3_json", None)),
        ("llama4", 'ipython{"name": function name}', ("llama4_json", None)),
        ("llama4", "ipython[func_name1(param1=1)]", ("llama4_pythonic", None)),
        ("llama", "<tool_call>", ("hermes", None)),
        ("llama", f"{CALL}```json</think>", ("deepseek_v3", "deepseek_r1")),
        ("smollm3", "<tool_call>", ("hermes", None)),
        ("mistral", "[TOOL_CALLS]", ("mistral", None)),
        ("mistral", "[TOOL_CALLS][THINK]", ("mistral", "mistral")),
        ("deepseek_v3", f"{CALL}```json", ("deepseek_v3", None)),
        ("deepseek_v3", f"{CALL}thinking is defined</think>", ("deepseek_v31", "deepseek_v3")),
        ("kimi_k2", "<|tool_calls_section_begin|>", ("kimi_k2", None)),
        ("kimi_k25", "<|tool_calls_section_begin|><think>", ("kimi_k2", "kimi_k2")),
        ("kimi_linear", "<|tool_calls_section_begin|>", ("kimi_k2", None)),
        ("gpt_oss", "<|channel|>", ("openai", "openai_gptoss")),
        ("glm4_moe", "<arg_key><think>", ("glm47", "glm47")),
        ("glm4_moe_lite", "<arg_key><think>", ("glm47", "glm47")),
        ("glm_moe_dsa", "<tool_call>{name}<arg_key>{key}</arg_key><|assistant|><think>", ("glm47", "glm47")),
        ("glm5_next", "<tool_call>{name}<arg_key>{key}</arg_key><|assistant|><think>", ("glm47", "glm47")),
        ("minimax_m2", "<minimax:tool_call><think>", ("minimax_m2", "minimax_m2")),
        ("minimax_m3_vl", "]<]minimax[>[<tool_call><mm:think>", ("minimax_m3", "minimax_m3")),
        ("nemotron_h", "<tool_call><function=<think>", ("qwen3_coder", "nemotron_v3")),
        ("nemotron_h_omni", "<tool_call><function=<think>", ("qwen3_coder", "nemotron_v3")),
        ("olmo3", "<function_calls><think>", ("olmo3", "olmo3")),
        ("phi3", "<|tool|>", ("phi4_mini_json", None)),
        ("granite", "<|tool_call|>Here is my thought process:", ("granite", "granite")),
        ("granitemoehybrid", "<tool_call>", ("granite4", None)),
        ("granite", "<tool_call><function=<think>", ("qwen3_coder", "granite_thinking_parser")),
        ("gemma3_text", "<start_function_call>", ("functiongemma", None)),
        ("gemma4", "<|tool_call>call:<tool_call|><|channel>thought<channel|>", ("gemma4", "gemma4")),
        ("gemma4_unified", "<|tool_call>call:<tool_call|>", ("gemma4", None)),
        ("seed_oss", "<seed:tool_call><function=<seed:think>", ("seed_oss", "seed_oss")),
        ("step3p5", "<tool_call><function=<think>", ("step3p5", "step3p5")),
        ("step3p7", "<tool_call><function=<think>", ("step3p5", "step3p5")),
        ("mimo_v2_flash", "<tool_call><function=<think>", ("mimo", "mimo")),
        ("hunyuan_v1_moe", "<tool_calls>[]</tool_calls><think>", ("hunyuan_a13b", "hunyuan_a13b")),
        ("ernie4_5_moe", "<tool_call><think>", ("ernie45", "ernie45")),
        ("lfm2_moe", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ("lfm2", None)),
        ("lfm2", "<|tool_list_start|>", ("lfm2", None)),
        ("apertus", "<|tools_prefix|>", ("apertus", None)),
        ("longcat_flash", "<longcat_tool_call>", ("longcat", None)),
        ("jamba", "<tool_calls>", ("jamba", None)),
        ("deepseek_v3", "function call{{ message_sep }}", ("gigachat3", None)),
        ("bailing_hybrid", "<tool_call><arg_key><think>", ("ling3", "ling3")),
        ("laguna", "<tool_call><arg_key><think>", ("poolside_v1", "poolside_v1")),
        ("hy_v3", "toolcall_begin_token think_begin_token", ("hy_v3", "hy_v3")),
        ("llama", '<function name="f"><param name="a"><think></think>', ("minicpm5", WRITTEN_THOUGHTS)),
        ("llama", "<function=f>ipython", (None, None)),
        ("llama", "ipython{{ 'This model only supports single tool-calls at once!' }}", (ONE_LLAMA_CALL, None)),
        ("mistral", "<tool_call><think></think>{% if enable_thinking %}", ("hermes", WRITTEN_THOUGHTS)),
        ("smollm3", "<tool_call><think>enable_thinking", ("hermes", WRITTEN_THOUGHTS)),
        ("qwen2_5_vl", "You are MiMo<tool_call>", ("hermes", WRITTEN_THOUGHTS)),
        ("qwen2_5_vl", "<tool_call>", ("hermes", None)),
        ("lfm2_moe", "<think></think><|tool_call_start|>", ("lfm2", WRITTEN_THOUGHTS)),
        ("lfm2", "List of tools: [</think>", ("lfm2", WRITTEN_THOUGHTS)),
        ("muse_glimmer", "<atem:function_calls>to=self<|message|>", ("muse_glimmer", "muse_glimmer")),
        ("gemma3_text", "", (None, None)),
        ("cohere2", "<|START_ACTION|>", (None, None)),
        ("", "<tool_call>", (None, None)),
    ],
)
def test_a_family_and_its_template_choose_the_parsers(kind: str, marks: str, expected: tuple[str | None, ...]) -> None:
    assert parsers_of(kind, f"{{% if tools %}}{marks}{{% endif %}}") == expected


def test_a_template_without_tools_and_calls_needs_no_parser_of_calls() -> None:
    assert parsers_of("qwen3", "<tool_call><think>") == (None, "qwen3")
    assert parsers_of("deepseek_v3", "{{ message['tool_calls'] }}" + CALL) == ("deepseek_v31", None)
    assert parsers_of("smollm3", "{% if xml_tools %}<tool_call>{% endif %}") == ("hermes", None)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("deepseek_v32", ("deepseek_v32", "deepseek_v3")),
        ("deepseek_v4", ("deepseek_v4", "deepseek_v4")),
        ("deepseek_v41", ("deepseek_v41", "deepseek_v41")),
        ("kimi_k3", ("kimi_k3", "kimi_k3")),
        ("inkling_mm_model", ("inkling", "inkling")),
    ],
)
@pytest.mark.parametrize("template", ["", "{% if tools %}<tool_call><think>{% endif %}"])
def test_a_model_that_vllm_renders_has_its_parsers_whatever_its_template(
    kind: str, template: str, expected: tuple[str, str]
) -> None:
    assert parsers_of(kind, template) == expected


def test_every_model_of_the_cookbook_is_of_a_kind_with_a_row() -> None:
    for model in listed().models:
        kind = model_type_of(model) or ""
        calls, thoughts = (any(kind.startswith(each.kinds) for each in rows) for rows in (CALLS, THOUGHTS))
        assert kind in RENDERED_BY_VLLM or (calls and thoughts), model


def test_templates_that_render_tools_are_known_by_their_own_text() -> None:
    assert parsers_of("qwen2", FAMILIES["hermes"].template)[0] == "hermes"
    assert parsers_of("mistral", FAMILIES["mistral"].template)[0] == "mistral"
    assert parsers_of("llama", FAMILIES["llama"].template)[0] == "llama3_json"
    assert parsers_of("qwen3", FAMILIES["plain"].template) == (None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (True, "hermes", "qwen3")),
        ({"tool_call_parser": "xlam"}, (True, "xlam", "qwen3")),
        ({"tool_call_parser": False}, (None, None, "qwen3")),
        ({"tool_call_parser": None}, (None, None, "qwen3")),
        ({"enable_auto_tool_choice": False}, (None, None, "qwen3")),
        ({"reasoning_parser": "deepseek_r1"}, (True, "hermes", "deepseek_r1")),
        ({"reasoning_parser": False}, (True, "hermes", None)),
    ],
)
def test_the_operators_options_win(tmp_path: Path, given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    options = parser_options(str(write(tmp_path, "qwen3", QWEN3)), given)
    assert (
        tuple(options[name] for name in ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser")) == expected
    )


def command(model: Path, **given: Any) -> list[str]:
    """The words of the command line that are about parsers, and what follows each."""
    config = load_config({"base_model": str(model), "backend_config": {ENGINE: given}})
    argv = vllm_spec(config, 9123, "secret", cuda=False).argv
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser")
    return [" ".join(argv[at : at + 2]) for at, word in enumerate(argv) if word in options]


def test_the_command_line_has_the_parsers_of_the_model(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3", QWEN3)
    auto, calls, thoughts = command(model)
    assert auto.startswith("--enable-auto-tool-choice")
    assert (calls, thoughts) == ("--tool-call-parser hermes", "--reasoning-parser qwen3")
    assert "--tool-call-parser xlam" in command(model, **{"tool-call-parser": "xlam"})
    assert command(model, tool_call_parser=False, reasoning_parser=False) == []


def test_the_tiny_model_whose_template_has_no_tools_has_no_parser() -> None:
    assert command(model_path()) == []
