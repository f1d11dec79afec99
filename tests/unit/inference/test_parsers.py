"""Which parsers a base model gets, by its kind and its template's text. The names are vLLM's own."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.parsers import CALLS, THOUGHTS, parser_options, parsers_of
from skyrl.inference.vllm_command import vllm_spec
from tests.unit.chat_families import FAMILIES

CALL = "tool\u2581calls\u2581begin"
QWEN3 = "{% if tools %}{{ tools }}<tool_call>{% endif %}<think>"
ENGINE = "generator.inference_engine.engine_init_kwargs"


def write(directory: Path, kind: str, template: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_has_every_parser_under_its_name() -> None:
    reasoning, tools = import_module("vllm.reasoning"), import_module("vllm.tool_parsers")
    assert {each.parser for each in CALLS} <= set(tools.ToolParserManager.list_registered())
    assert {each.parser for each in THOUGHTS} <= set(reasoning.ReasoningParserManager.list_registered())


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
        ("glm4_moe", "<arg_key><think>", ("glm45", "glm45")),
        ("minimax_m2", "<minimax:tool_call><think>", ("minimax_m2", "minimax_m2")),
        ("nemotron_h", "<tool_call><function=<think>", ("qwen3_coder", "nemotron_v3")),
        ("olmo3", "<function_calls><think>", ("olmo3", "olmo3")),
        ("phi3", "<|tool|>", ("phi4_mini_json", None)),
        ("granite", "<|tool_call|>Here is my thought process:", ("granite", "granite")),
        ("granitemoehybrid", "<tool_call>", ("granite4", None)),
        ("gemma3_text", "<start_function_call>", ("functiongemma", None)),
        ("gemma3_text", "", (None, None)),
        ("cohere2", "<|START_ACTION|>", (None, None)),
        ("", "<tool_call>", (None, None)),
    ],
)
def test_a_family_and_its_template_choose_the_parsers(kind: str, marks: str, expected: tuple[str | None, ...]) -> None:
    assert parsers_of(kind, f"{{% if tools %}}{marks}{{% endif %}}") == expected
    assert parsers_of(kind, marks) == (None, None), "the template has no tools"


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
