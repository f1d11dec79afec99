"""The documentation's page of what agents send: kinds of items and of blocks, and what becomes of each.

`codex_items.json` keeps the kinds of items of a Codex from npm. The kinds of the SDKs of OpenAI and Anthropic are those
of the installed packages.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from anthropic.types.beta import beta_content_block_param
from openai.types.responses import response_input_item_param

from skyrl.chat.dialects.messages import conversation
from skyrl.chat.dialects.responses import fields
from tests.agents.npm_packages import installed
from tests.environments import ROOT

PAGE = ROOT / "docs" / "reference" / "agents.md"
KEPT = Path(__file__).parent / "codex_items.json"
CODEX = "@openai/codex"
SCHEMA_S = 60.0
INTRODUCTION = """# What agents send

What becomes of each item of OpenAI's Responses and each block of Anthropic's Messages that a request may hold.
[Agents](../howto/agents.md) explains the rest. `make tables` writes this page from the schema that {codex}
prints, and from the types of {openai} and {anthropic}. A kind that is not listed is refused with a 400
that names it.

What is left out of the prompt is named in the header `X-Skyrl-Left-Out` of the answer, with its place in the request,
in up to 1,000 characters.
"""
SAYS: Mapping[fields.Fate | conversation.Fate, str] = {
    "message": "a message",
    "answer": "a part of the model's answer",
    "result": "the result of a call",
    "tools": "its tools stand behind the request's own",
    "setting": "sets `reasoning` and `text` of the request",
    "shown": "the model sees it",
    "left out": "left out",
    "refused": "400",
}


class Codex(NamedTuple):
    """A version of Codex, and the kinds of its items."""

    version: str
    kinds: Sequence[str]


def kinds_of_codex(program: Path) -> list[str]:
    """The kinds of items in the schema that a Codex prints."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(program), "app-server", "generate-json-schema", "--out", directory]
        subprocess.run(command, check=True, capture_output=True, timeout=SCHEMA_S)
        for file in sorted(Path(directory).glob("*.json")):
            item = (json.loads(file.read_text()).get("definitions") or {}).get("ResponseItem")
            if item is not None:
                return sorted(kind for one in item["oneOf"] for kind in one["properties"]["type"]["enum"])
    raise ValueError("the schema of this Codex has no ResponseItem")


def kinds_of_sdk(union: Any) -> list[str]:
    """The values of `type` in a union of an SDK's types. Answers, which may be sent back and are a union in it, have
    no other kinds."""
    hints = (typing.get_type_hints(one)["type"] for one in typing.get_args(union) if isinstance(one, type))
    return sorted({kind for hint in hints for kind in _literals(hint)})


def _literals(hint: Any) -> list[str]:
    """The texts in a literal, or in an optional one."""
    return [text for part in typing.get_args(hint) for text in ([part] if isinstance(part, str) else _literals(part))]


def openai_items() -> list[str]:
    return kinds_of_sdk(response_input_item_param.ResponseInputItemParam)


def anthropic_blocks() -> list[str]:
    return kinds_of_sdk(beta_content_block_param.BetaContentBlockParam)


def kept() -> Codex:
    return Codex(**json.loads(KEPT.read_text()))


def page(codex: Codex) -> str:
    """Equal kinds and versions give an equal page."""
    names = {name: f"`{name}` {version(name)}" for name in ("openai", "anthropic")}
    return (
        INTRODUCTION.format(codex=f"Codex {codex.version}", **names)
        + _list("items of Responses", {kind: _item(kind) for kind in sorted(fields.KINDS)})
        + _list("blocks of Messages", {kind: _block(kind) for kind in sorted(conversation.KINDS)})
    )


def _item(kind: str) -> str:
    if (call := fields.CLIENT_CALLS.get(kind)) is not None:
        return f"a call of the function `{call.name}`"
    why = fields.LEFT_OUT.get(kind) or fields.REFUSED.get(kind)
    return SAYS[fields.KINDS[kind]] + (f": {why}" if why else "")


def _block(kind: str) -> str:
    why = conversation.LEFT_OUT.get(kind) or conversation.REFUSED.get(kind)
    return SAYS[conversation.KINDS[kind]] + (f": {why}" if why else "")


def _list(title: str, fates: Mapping[str, str]) -> str:
    """One row for kinds of which the same becomes."""
    alike: dict[str, list[str]] = {}
    for kind, fate in fates.items():
        alike.setdefault(fate, []).append(f"`{kind}`")
    lines = [f"- {', '.join(names)}: {fate}\n" for fate, names in alike.items()]
    return f"\n## {title}\n\n{''.join(lines)}"


def unknown(codex: Codex) -> dict[str, list[str]]:
    """The kinds that the server does not know, by who sends them."""
    given = {
        "Codex": (codex.kinds, fields.KINDS),
        "openai": (openai_items(), fields.KINDS),
        "anthropic": (anthropic_blocks(), conversation.KINDS),
    }
    found = {name: [kind for kind in kinds if kind not in known] for name, (kinds, known) in given.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


def measured() -> dict[str, list[str]]:
    """Keep the kinds of the newest Codex, installed from npm in a temporary folder. Returns the unknown kinds."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        newest = installed(home, {CODEX: "latest"})[CODEX]
        codex = Codex(newest, kinds_of_codex(home / "node_modules" / ".bin" / "codex"))
    KEPT.write_text(json.dumps(codex._asdict(), indent=2) + "\n")
    return unknown(codex)
