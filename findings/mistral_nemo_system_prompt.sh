#!/usr/bin/env bash
# The chat template of Mistral-Nemo-Instruct-2407 leaves the system prompt out as soon as a tool has answered.
#
# Guess:    a template that takes a system message shows it in every prompt of the conversation.
# Seen:     it is written beside the newest message alone, and only if that message is the user's. In a prompt that ends
#           with the result of a tool there is no system prompt; in the second turn of a talk it stands behind the first.
# Version:  the template as llama-cpp-python 0.3.36 carries it, rendered by Jinja2 3.1.6.
# Source:   models/templates/mistralai-Mistral-Nemo-Instruct-2407.jinja: "if loop.last and system_message is defined".
# Cost:     an agent's instructions are gone in all steps but the first, and no prompt begins with the one before it, so
#           that neither a prefix cache nor exact trajectories work.
# skyrl:    puts the system prompt in front of the first user's message of such a template (docs/howto/agents.md).
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
# pip fails after the download, because it cannot build the package's description; the file is there all the same.
(cd "$work" && "$work/env/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
  llama-cpp-python==0.3.36 > /dev/null 2>&1 || true)
tar -xzf "$work/llama_cpp_python-0.3.36.tar.gz" -C "$work" --wildcards --strip-components=5 \
  '*/models/templates/mistralai-Mistral-Nemo-Instruct-2407.jinja'
"$work/env/bin/python" - "$work/mistralai-Mistral-Nemo-Instruct-2407.jinja" <<'PY'
import json
import sys
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
template = environment.from_string(Path(sys.argv[1]).read_text())

SYSTEM = "Answer in one word."
tool = {"type": "function", "function": {"name": "count", "description": "Counts boats.", "parameters": {}}}
call = {"id": "call00000", "function": {"name": "count", "arguments": {}}}
asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How many boats?"}]
called = [{"role": "assistant", "content": "", "tool_calls": [call]}]
result = [{"role": "tool", "content": "7", "tool_call_id": "call00000"}]
talked = [{"role": "assistant", "content": "Seven."}, {"role": "user", "content": "And ships?"}]


def prompt(messages, tools=None):
    return template.render(messages=messages, tools=tools, bos_token="<s>", eos_token="</s>")


first, loop, second = prompt(asked), prompt([*asked, *called, *result], [tool]), prompt([*asked, *talked])
for name, text in (("first prompt", first), ("after a tool's result", loop), ("second turn", second)):
    print(f"{name}: {text}\n")
assert SYSTEM in first
assert SYSTEM not in loop, "changed: the system prompt is there after a tool's result"
assert second.index(SYSTEM) > second.index("How many boats?"), "changed: the system prompt stands at the beginning"
assert not second.startswith(first), "changed: the second prompt begins with the first"
print("as written: the system prompt is beside the newest user's message alone")
PY
