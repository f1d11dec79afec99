"""What becomes of agent sessions of the cookbook's models, and of some more: with their own released templates where
the package has them, else with the nearest relative's, or with vLLM's code for the family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jinja2.sandbox import SandboxedEnvironment

from skyrl.chat.agents.rendering import renderer as chat_template
from skyrl.chat.agents.rendering.renderer import ChatTemplate, Renderer
from skyrl.chat.agents.rendering.vllm_renderers import DeepSeek, Harmony, Inkling
from tests.released_sessions.play import SPECIAL, Model
from tests.released_templates import released_templates

FIGURES = Path(__file__).with_name("cookbook.json")
DEEPSEEK_END = ("<｜end▁of▁sentence｜>",)
ALLOWED = ("exact", "same text", "other form of the answer")


@dataclass(frozen=True)
class Source:
    """Where a model's chats come from: a released `template`, which is `own` or a relative's; or `code` of vLLM, with
    the tokens that end its answers. `thinks`: vLLM reads thoughts out of its answers."""

    template: str = ""
    own: bool = True
    thinks: bool = True
    code: Callable[[], Renderer] | None = None
    stops: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        if self.code is not None:
            return "vLLM's code"
        return "its own template" if self.own else f"the template of {self.template}"


QWEN3, QWEN35 = Source("Qwen-Qwen3-0.6B"), Source("Qwen3.5-4B")
INSTRUCT = Source("Qwen-Qwen2.5-7B-Instruct", own=False, thinks=False)
NEMOTRON = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
SOURCES: Mapping[str, Source] = {
    "meta-llama/Llama-3.1-8B-Instruct": Source("meta-llama-Llama-3.1-8B-Instruct", thinks=False),
    "meta-llama/Llama-3.3-70B-Instruct": Source("meta-llama-Llama-3.3-70B-Instruct", thinks=False),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": INSTRUCT,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": INSTRUCT,
    "Qwen/Qwen3-8B-Base": QWEN3,
    "Qwen/Qwen3-30B-A3B-Base": QWEN3,
    "Qwen/Qwen3-8B": QWEN3,
    "Qwen/Qwen3-32B": QWEN3,
    "Qwen/Qwen3-30B-A3B": QWEN3,
    "Qwen/Qwen3-4B-Instruct-2507": INSTRUCT,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": INSTRUCT,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": INSTRUCT,
    **{
        f"Qwen/Qwen3.5-{size}": QWEN35
        for size in ("4B", "9B", "9B-Base", "27B", "35B-A3B", "35B-A3B-Base", "397B-A17B")
    },
    **{f"Qwen/{name}": Source("Qwen3.5-4B", own=False) for name in ("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B")},
    "deepseek-ai/DeepSeek-V3.1": Source("deepseek-ai-DeepSeek-V3.1"),
    "deepseek-ai/DeepSeek-V3.1-Base": Source("deepseek-ai-DeepSeek-V3.1"),
    **{
        f"deepseek-ai/DeepSeek-V4.1-{name}": Source(code=lambda: DeepSeek("deepseek_v41"), stops=DEEPSEEK_END)
        for name in ("Flash", "Flash-1017")
    },
    **{f"openai/gpt-oss-{size}": Source(code=Harmony, stops=("<|return|>", "<|call|>")) for size in ("20b", "120b")},
    "moonshotai/Kimi-K2-Thinking": Source("Kimi-K2-Thinking"),
    "moonshotai/Kimi-K2.5": Source("Kimi-K2-Thinking", own=False),
    "moonshotai/Kimi-K2.6": Source("Kimi-K2-Thinking", own=False),
    "zai-org/GLM-5.3": Source("GLM-4.7-Flash", own=False),
    "zai-org/GLM-5.3-Flash": Source("GLM-4.7-Flash", own=False),
    f"nvidia/{NEMOTRON}": Source(NEMOTRON),
    **{
        f"nvidia/NVIDIA-Nemotron-{name}-BF16": Source(NEMOTRON, own=False)
        for name in ("3-Super-120B-A12B", "3-Ultra-550B-A55B", "3.5-Lightning-30B-A3B", "3.5-Super-VL-120B-A12B")
    },
    "google/gemma-4-31B-it": Source("google-gemma-4-31B-it"),
    "zai-org/GLM-4.7-Flash": Source("GLM-4.7-Flash"),
    "tencent/Hy3": Source("tencent-Hy3"),
    "mistralai/Ministral-3-14B-Reasoning-2512": Source("mistralai-Ministral-3-14B-Reasoning-2512"),
    "MiniMaxAI/MiniMax-M3": Source("MiniMax-M3"),
    "deepseek-ai/DeepSeek-V3.2": Source(code=lambda: DeepSeek("deepseek_v32"), stops=DEEPSEEK_END),
    "LiquidAI/LFM2-8B-A1B": Source("LFM2-8B-A1B", thinks=False),
    "LiquidAI/LFM2.5-1.2B-Instruct": Source("LFM2.5-Instruct", thinks=False),
    "LiquidAI/LFM2.5-8B-A1B": Source("LFM2.5-8B-A1B"),
    **{
        f"thinkingmachines/{name}": Source(code=Inkling, stops=("<|content_model_end_sampling|>",))
        for name in ("Inkling", "Inkling-Small", "Inkling-2-Small")
    },
}
"""By the model's name on the hub."""
NONE: Mapping[str, str] = {
    **{f"meta-llama/Llama-{name}": "the release has no chat template" for name in ("3.2-1B", "3.2-3B", "3.1-8B")},
    "meta-llama/Llama-3.1-70B": "the release has no chat template",
    "moonshotai/Kimi-K3.1-Pro": "vLLM renders it with code of the model's repository: each turn forks",
}


def measured() -> dict[str, dict[str, Any]]:
    """For each model: the source of its chats, the switches of its sessions, and what becomes of loops of tools and of
    the user's turns: "exact", or why they fork. Raises CannotFetch."""
    directory = released_templates()
    known: dict[Source, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, source in SOURCES.items():
        if source not in known:
            known[source] = _measured(source, directory)
        found[name] = {"source": source.shown} | known[source]
    return found | {name: {"source": "", "tool_loops": why, "user_turns": why} for name, why in NONE.items()}


def _measured(source: Source, directory: Path) -> dict[str, Any]:
    if source.code is not None:
        model = Model(source.code(), thinks=source.thinks, stops=source.stops)
    else:
        # The package's edit of Kimi's templates appends to lists, which the sandbox of vLLM forbids; the release's own
        # does not.
        environment = (
            SandboxedEnvironment if source.template.startswith("Kimi") else chat_template.ImmutableSandboxedEnvironment
        )
        with patch.object(chat_template, "ImmutableSandboxedEnvironment", environment):
            renderer = ChatTemplate((directory / f"{source.template}.jinja").read_text(), SPECIAL)
        model = Model(renderer, thinks=source.thinks, by_vllm=not source.template.startswith("Kimi"))
    turns = model.play()
    assert not [turn for turn in turns if turn.outcome == "wrong"], source
    loops = [turn for turn in turns if turn.script.loops]
    talk = [turn for turn in turns if turn.script.name.startswith("talk")]
    exact = [all(turn.outcome in ALLOWED for turn in some) for some in (loops, talk)]
    reasons = (model.habits.tool_loops, model.habits.user_turns)
    told = [None if fine else reason or "some forms of it fork" for fine, reason in zip(exact, reasons, strict=True)]
    return {
        "switches": model.habits.switches,
        "tool_loops": told[0] or "exact",
        "user_turns": told[1] or "exact",
    }


def main() -> None:
    FIGURES.write_text(json.dumps(measured(), indent=1) + "\n")
    print(FIGURES.read_text())


if __name__ == "__main__":
    main()
