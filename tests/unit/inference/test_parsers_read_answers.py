"""vLLM's own parsers, as chosen for a family, read an answer in that family's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from skyrl.inference.parsers import CALLS, RENDERED_BY_VLLM, THOUGHTS, WRITTEN_THOUGHTS, parsers_of
from tests.unit.inference import reading

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
XML = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
JSON = '{"name": "f", "arguments": {"a": 1}}'
GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DSML = "\uff5cDSML\uff5c"
M3 = "]<]minimax[>["
K3 = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
K2 = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
INKLING = (
    "<|message_model|>",
    "<|content_thinking|>",
    "<|end_message|>",
    "<|content_invoke_tool_json|>",
    "<|content_text|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<|content_model_end_sampling|>",
)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def dsml(space: str, block: str) -> str:
    """A call of `f` in DeepSeek's format from V3.2 on: its tags differ by a space and by the name of the block."""
    tag = f"{DSML}{space}"
    value = f'<{tag}parameter name="a" string="false">1</{tag}parameter>'
    return f'<{tag}{block}>\n<{tag}invoke name="f">\n{value}\n</{tag}invoke>\n</{tag}{block}>'


def k3(*parts: str) -> str:
    """Kimi K3's tags: a part that begins with a slash is a closing tag, one in brackets is text."""
    return "".join(
        part[1:-1] if part[0] == "[" else f"<|{'close' if part[0] == '/' else 'open'}|>{part.lstrip('/')}<|sep|>"
        for part in parts
    )


def tokenizer_of(special: Sequence[str]) -> Any:
    """A tokenizer of single bytes that has the format's markers as tokens, as the family's own has."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    bytes_of_text = tokenizers.pre_tokenizers.ByteLevel
    alphabet = {character: number for number, character in enumerate(sorted(bytes_of_text.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = bytes_of_text(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    wrapped.add_tokens(list(special))
    return wrapped


def read(calls: str | None, thoughts: str | None, special: Sequence[str], answer: str) -> tuple[Any, list[Any]]:
    """The thoughts, and name and arguments of each call, that vLLM answers with for the text `answer`."""
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = import_module("vllm.parser.parser_manager").ParserManager
    tokenizer = tokenizer_of(special)
    request = protocol.ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=[{"type": "function", "function": TOOL}]
    )
    parser = manager.get_parser(calls, thoughts, True, "m", tokenizer=tokenizer)(tokenizer, request.tools)
    reasoning, _, called = parser.parse(
        answer, request, enable_auto_tools=True, model_output_token_ids=tokenizer.encode(answer)
    )
    return reasoning and reasoning.strip(), [(each.name, each.arguments) for each in called or ()]


def test_vllm_loads_every_parser_by_its_name() -> None:
    reading.use_plugin()
    reasoning, tools = import_module("vllm.reasoning"), import_module("vllm.tool_parsers")
    for name in {each.parser for each in CALLS if each.parser} | {calls for calls, _ in RENDERED_BY_VLLM.values()}:
        assert tools.ToolParserManager.get_tool_parser(name)
    for name in {each.parser for each in THOUGHTS if each.parser} | {
        thoughts for _, thoughts in RENDERED_BY_VLLM.values()
    }:
        assert reasoning.ReasoningParserManager.get_reasoning_parser(name)


@pytest.mark.parametrize(
    ("kind", "special", "answer"),
    [
        ("qwen3", (*THINK, *CALL), f"<think>hm</think>\n\n<tool_call>\n{JSON}\n</tool_call>"),
        ("qwen3_5", (*THINK, *CALL), f"hm\n</think>\n\n{XML}"),
        ("nemotron_h", (*THINK, *CALL), f"hm\n</think>\n{XML}"),
        ("granite", (*THINK, *CALL), f"hm\n</think>\n{XML}"),
        ("step3p5", (*THINK, *CALL), f"hm\n</think>\n{XML}"),
        ("mimo_v2_flash", (*THINK, *CALL), f"hm</think>{XML}"),
        (
            "glm_moe_dsa",
            (*THINK, *CALL, *GLM),
            "hm</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        ),
        (
            "glm4_moe",
            (*THINK, *CALL, *GLM),
            "<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        ),
        (
            "seed_oss",
            ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
            "<seed:think>hm</seed:think>" + XML.replace("tool_call", "seed:tool_call"),
        ),
        (
            "gemma4",
            ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|turn>", "<turn|>", '<|"|>'),
            "<|channel>thought\nhm<channel|><|tool_call>call:f{a:1}<tool_call|>",
        ),
        (
            "minimax_m3_vl",
            ("<mm:think>", "</mm:think>", M3),
            f'<mm:think>hm</mm:think>{M3}<tool_call>\n{M3}<invoke name="f">{M3}<a>1{M3}</a>'
            f"{M3}</invoke>\n{M3}</tool_call>",
        ),
        ("ernie4_5_moe", (*THINK, *CALL), f"hm\n</think>\n\n\n<tool_call>\n{JSON}\n</tool_call>\n"),
        ("hunyuan_v1_moe", (), f"<think>\nhm\n</think>\n<answer>\n<tool_calls>[{JSON}]</tool_calls>\n</answer>"),
        (
            "muse_glimmer",
            ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
            " to=self<|message|>hm<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
            '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls><|eot|>",
        ),
        (
            "kimi_k25",
            (*THINK, *K2),
            f'<think>hm</think>{K2[0]}{K2[2]}functions.f:0{K2[4]}{{"a": 1}}{K2[3]}{K2[1]}',
        ),
        (
            "inkling_mm_model",
            INKLING,
            f"{INKLING[0]}{INKLING[1]}hm{INKLING[2]}{INKLING[0]}{INKLING[3]}"
            f'{{"name": "f", "args": {{"a": 1}}}}{INKLING[2]}',
        ),
        ("deepseek_v4", (*THINK, DSML), f"hm</think>{dsml('', 'tool_calls')}"),
        ("deepseek_v41", (*THINK, DSML), f"hm</think>{dsml(' ', 'calls')}"),
        (
            "kimi_k3",
            K3,
            "hm"
            + k3("/think", "response", "/response", "tools", 'call tool="f" index="1"')
            + k3('argument key="a" type="number"', "[1]", "/argument", "/call", "/tools", "/message"),
        ),
    ],
)
def test_a_familys_parsers_read_thoughts_and_a_call(kind: str, special: Sequence[str], answer: str) -> None:
    """The answer stands for the template, which renders such answers and begins thoughts in the prompt."""
    calls, thoughts = parsers_of(kind, f"{{% if tools %}}<think>{answer}{{% endif %}}")
    assert read(calls, thoughts, special, answer) == ("hm", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("kind", "template", "special", "answer"),
    [
        ("deepseek_v32", "", (*THINK, DSML), dsml("", "function_calls")),
        ("llama4", "ipython", ("<|python_tag|>",), '{"name": "f", "parameters": {"a": 1}}'),
        ("llama4", "ipython [func_name1(", (), "[f(a=1)]"),
        ("llama", "ipython [func_name1(", (), "[f(a=1)]"),
        (
            "lfm2",
            "<|tool_list_start|>",
            ("<|tool_call_start|>", "<|tool_call_end|>"),
            "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
        ),
        (
            "apertus",
            "<|tools_prefix|>",
            ("<|tools_prefix|>", "<|tools_suffix|>"),
            '<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
        ),
        (
            "longcat_flash",
            "<longcat_tool_call>",
            ("<longcat_tool_call>", "</longcat_tool_call>"),
            f"<longcat_tool_call>{JSON}</longcat_tool_call>",
        ),
        ("jamba", "<tool_calls>", ("<tool_calls>", "</tool_calls>"), f"<tool_calls>[{JSON}]</tool_calls>"),
    ],
)
def test_a_familys_parsers_read_a_call_without_thoughts(
    kind: str, template: str, special: Sequence[str], answer: str
) -> None:
    calls, thoughts = parsers_of(kind, f"{{% if tools %}}{template}{{% endif %}}")
    assert read(calls, thoughts, special, answer) == (None, [("f", '{"a": 1}')])


TOOLS = [{"type": "function", "function": TOOL}]
ONE = {"a": 1}


def read_by(calls: str | None, thoughts: str | None, markers: Sequence[str], answer: str, prompt: str = "?") -> Any:
    """What is found, whole and streamed, with the parsers of this server's plugin."""
    reading.use_plugin()
    tokenizer = reading.tokenizer_of(markers, special=False)
    return reading.read((calls, thoughts), tokenizer, TOOLS, answer, prompt=prompt)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (JSON, (None, None, [("f", ONE)])),
        (f"```json\n{JSON}\n```", (None, None, [("f", ONE)])),
        (f"[{JSON},\n {JSON}]", (None, None, [("f", ONE)] * 2)),
        (f"{JSON}\n{JSON}", (None, None, [("f", ONE)] * 2)),
        (f"{JSON}\nDone.", (None, "Done.", [("f", ONE)])),
        (f"<tool_call>\n{JSON}\n</tool_call>", (None, None, [("f", ONE)])),
        (f"So: {JSON}", (None, f"So: {JSON}", [])),
        (JSON.replace('"f"', '"other"'), (None, JSON.replace('"f"', '"other"'), [])),
        ('{"a": 1}', (None, '{"a": 1}', [])),
        ("{", (None, "{", [])),
        ("```python\nf(1)\n```", (None, "```python\nf(1)\n```", [])),
        ("Yes.", (None, "Yes.", [])),
    ],
)
def test_bare_json_is_read_as_calls_by_an_option(answer: str, expected: Any) -> None:
    """Qwen2.5-Coder writes no `<tool_call>`. A tool that the request does not have is no call."""
    assert read_by("skyrl_bare_json", None, CALL, answer) == expected


@pytest.mark.parametrize("markers", [THINK, ()])
@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("?", "<think>\nhm\n</think>\n\nYes.", ("hm", "Yes.", [])),
        ("?", "\n<think>hm", ("hm", None, [])),
        ("?", "Yes.", (None, "Yes.", [])),
        ("?", "<thin", (None, "<thin", [])),
        ("?<think>\n", "hm\n</think>\n\nYes.", ("hm", "Yes.", [])),
        ("?<think>\n", "hm", ("hm", None, [])),
        ("?<think>\n\n</think>\n\n", "Yes.", (None, "Yes.", [])),
        ("<think>so</think>No.<|im_end|>?", "<think>hm</think>Yes.", ("hm", "Yes.", [])),
    ],
)
def test_thoughts_are_those_that_the_model_writes(markers: Any, prompt: str, answer: str, expected: Any) -> None:
    assert read_by(None, WRITTEN_THOUGHTS, markers, answer, prompt) == expected


def test_a_grammar_begins_where_written_thoughts_are_not_open() -> None:
    """Nobody knows whether the model will think; one that is held from the first token cannot."""
    reading.use_plugin()
    tokenizer = reading.tokenizer_of(THINK, special=False)
    manager = import_module("vllm.parser.parser_manager").ParserManager
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}])
    parser = manager.get_parser(None, WRITTEN_THOUGHTS, False, "m", tokenizer=tokenizer)(tokenizer)
    starts = {
        end: request.resolve_reasoning_ended(parser, tokenizer.encode(f"?{end}"))
        for end in ("", "<think>\n", "<think>\n\n</think>\n\n")
    }
    assert list(starts.values()) == [True, False, True]
    engine = parser.reasoning_parser.__class__(tokenizer)
    ids = tokenizer.encode("?<think>hm</think>")
    assert not engine.is_reasoning_end_streaming(ids[:-1], ids[-2:-1])
    assert engine.is_reasoning_end_streaming(ids, ids[-1:])


@pytest.mark.parametrize("markers", [("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]", "[ARGS]")])
def test_an_id_in_mistrals_call_is_no_part_of_its_name(markers: Any) -> None:
    written = "".join(f"[TOOL_CALLS]f[CALL_ID]abc12345{number}[ARGS]{json.dumps(ONE)}" for number in (1, 2))
    assert read_by("mistral", None, markers, written) == (None, None, [("f", ONE)] * 2)
    tokenizer = reading.tokenizer_of(markers, special=False)
    kind = import_module("vllm.tool_parsers").ToolParserManager.get_tool_parser("mistral")
    told = kind(tokenizer).extract_tool_calls(written, None)
    assert [call.id for call in told.tool_calls] == ["abc123451", "abc123452"]


def test_of_several_calls_of_llama_the_first_is_given() -> None:
    calls = "; ".join([JSON.replace("arguments", "parameters")] * 2)
    assert read_by("llama3_json", None, ("<|python_tag|>",), calls) == (None, None, [("f", ONE)] * 2)
    assert read_by("skyrl_one_llama_call", None, ("<|python_tag|>",), calls) == (None, None, [("f", ONE)])
