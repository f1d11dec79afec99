"""vLLM's own parsers, as chosen for a family, read an answer in that family's format."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from skyrl.inference.parsers import CALLS, RENDERED_BY_VLLM, THOUGHTS, parsers_of

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
    import_module("skyrl.inference.vllm_plugin.parsers").add_parsers()
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
