"""Make a tiny model that is asked to call tools: `python -m skyrl.base.tiny.tools --out DIR`.

It is the checked-in model with another chat template, which shows tools as Hermes' models know them, and with a longer
context, because agents send prompts of tens of thousands of tokens. The weights are the same: it calls a tool where a
grammar holds it to a call (`tool_choice` `required` or named), and hardly ever by itself. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from skyrl.base.tiny import model_path

CONTEXT = 131072
"""Tokens. Rotary positions need no weights, so that any context can be set."""
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nEach line is a tool:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one so:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def make(out: Path, context: int = CONTEXT) -> None:
    """Write the model, its tokenizer and the template into `out`. `context` is in tokens."""
    shutil.copytree(model_path(), out, dirs_exist_ok=True)
    _set(out / "config.json", max_position_embeddings=context)
    _set(out / "tokenizer_config.json", model_max_length=context, chat_template=CHAT_TEMPLATE)


def _set(file: Path, **values: int | str) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model that is asked to call tools.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--context", type=int, default=CONTEXT, help="longest sequence, in tokens")
    given = parser.parse_args()
    make(given.out, given.context)


if __name__ == "__main__":
    main()
