"""The tenants of a run: what each asks for. Knows no server."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.tiny import tools
from skyrl.base.tiny.corpus import TASKS, Task, chat_prompt, paragraph

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class Rl:
    """RL on a task: a step has `prompts` prompts with `group` answers each, of at most `tokens` tokens. `sentences`:
    so many stand before the question."""

    task: Task
    prompts: int = 3
    group: int = 6
    tokens: int = 32
    sentences: int = 0

    def question(self, chance: random.Random) -> tuple[str, object]:
        """A prompt, and what the task's reward needs."""
        asked, state = self.task.prompt(chance)
        before = f"{paragraph(chance, self.sentences)} " if self.sentences else ""
        return chat_prompt(before + asked), state


KINDS: dict[str, Rl | None] = {
    "count": Rl(TASKS["count"], prompts=2, group=4, tokens=24),
    "sort": Rl(TASKS["sort"]),
    "long": Rl(TASKS["count"], prompts=1, group=2, sentences=80),
    "agents": None,
}
"""By name. `long` has prompts of about 1,200 tokens. None: agents with 300 tools, which do not train."""


def with_tools(model: Path, directory: Path) -> Path:
    """The files of `model`, with a template that takes tools: ChatML, which names them."""
    directory.mkdir()
    for file in model.iterdir():
        if file.name not in (TEMPLATE, SETTINGS):
            (directory / file.name).symlink_to(file.resolve())
    settings = json.loads((model / SETTINGS).read_text())
    settings.pop("chat_template", None)
    (directory / SETTINGS).write_text(json.dumps(settings))
    (directory / TEMPLATE).write_text(tools.CHAT_TEMPLATE.replace("tool | tojson", "tool.function.name"))
    return directory
