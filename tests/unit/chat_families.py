"""Chat formats of released families of models, written anew as templates, and models' directories that have them.

The tokenizer is the tiny model's, with the family's special tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from skyrl.base.tiny import model_path

HERMES = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% endif %}

# Tools
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role != 'system' or not tools %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{%- set made = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + made | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """\
{%- set at = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > at.last and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{%- set made = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + made | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

QWEN35 = (
    """\
{%- for message in messages %}{% if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}
"""
    + QWEN3
)

LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{{ '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eom_id|>' }}
{%- elif message.role != 'system' %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set turn = namespace(number=0, last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set turn.last = loop.index0 %}{% endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turn.number % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- set turn.number = turn.number + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == turn.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + {'content': message.content, 'call_id': message.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{{- '' if loop.last else ', ' }}
{%- endfor %}{{ ']' + eos_token }}
{%- else %}{{ message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'tool' %}
{{- '<|tool_output|>' + message.content }}
{%- else %}
{{- '' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<|Assistant|>' }}
{{- message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call|>' + call.function.name + '\\n' + call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif %}"""

PLAIN = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}assistant: """


@dataclass(frozen=True)
class Family:
    """A template, the special tokens beside the tiny tokenizer's, and those that end an answer. The first one is the
    tokenizer's."""

    template: str
    ends: tuple[str, ...] = ("<|im_end|>",)
    special: tuple[str, ...] = ()


FAMILIES = {
    "hermes": Family(HERMES),
    "qwen3": Family(QWEN3),
    "qwen35": Family(QWEN35),
    "llama": Family(
        LLAMA,
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": Family(
        MISTRAL,
        ("</s>",),
        ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
        + ("[/TOOL_RESULTS]",),
    ),
    "deepseek": Family(
        DEEPSEEK, ("<|end|>",), ("<|begin|>", "<|User|>", "<|Assistant|>", "<|tool_output|>", "<|tool_call|>")
    ),
    "plain": Family(PLAIN),
}


def write_model(directory: Path, family: Family) -> Path:
    """A directory with what a template and a tokenizer need, as models come."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    tokenizer.add_special_tokens([*family.ends, *family.special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.ends[0]}
    if family.special:
        settings["bos_token"] = family.special[0]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(family.template)
    ends = [tokenizer.token_to_id(end) for end in family.ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory
