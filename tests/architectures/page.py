"""docs/reference/architectures.md: made from the families of `tests.families`, the figures that their tests measured,
the cookbook's models, and `page.md`, which has the text that is written by hand.

Equal inputs give an equal page. Measures nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skyrl.base.config.server import ConfigError
from skyrl.trainer.files.config import NEWER, SAME_CLASS
from skyrl.trainer.model.base_model import check_config
from tests.architectures.cookbook import Cookbook, model_type_of
from tests.architectures.rows import ROWS
from tests.environments import ROOT
from tests.families import FAMILIES, MIXTURES

PAGE = ROOT / "docs" / "reference" / "architectures.md"
TEMPLATE = Path(__file__).with_name("page.md")
SESSIONS = ROOT / "tests" / "released_sessions" / "cookbook.json"
"""What `python -m tests.released_sessions.cookbook` has measured."""
TRIED = FAMILIES | MIXTURES
REFUSED = "refused"
"""In the figures: what the trainer says of the architectures that it refuses, by `model_type`."""
UNKNOWN = "unknown to this page"
SHORT = {
    "message 2: the template leaves out the answer's thinking": "left out",
    "message 2: the template leaves out the answer's tool call": "calls left out",
    "the release has no chat template": "–",
    "vLLM renders it with code of the model's repository: each turn forks": "forks",
}
"""What the table says instead of a session's note; the page explains it."""

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """Whether a model of the cookbook trains here, and why not."""

    model: str
    renderer: str
    model_type: str
    trains: bool
    why: str


def render(figures: Figures, cookbook: Cookbook) -> str:
    """The whole page."""
    measured = {family: figures[family] for family in TRIED if family in figures}
    found, sessions = verdicts(figures, cookbook), json.loads(SESSIONS.read_text())
    parts = {
        "families": _families(measured),
        "adapted": _adapted(measured),
        "cookbook": _cookbook(found, sessions),
        "beyond": _beyond(found, sessions),
        "loops": _exact(found, sessions, "tool_loops"),
        "turns": _exact(found, sessions, "user_turns"),
        "release": cookbook.version,
        "models": str(len(found)),
        "trained": str(sum(verdict.trains for verdict in found)),
        "logprob": _largest(each.get("logprob") for each in measured.values()),
        "gradient": _largest(each.get("gradient") for each in measured.values()),
        "replayed": _largest(each.get("replayed") for each in measured.values() if each.get("replay")),
        "vllm": _largest(_gap(each) for each in measured.values() if _dtype(each) == "float32"),
    }
    text = TEMPLATE.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def needed(figures: Figures, cookbook: Cookbook) -> dict[str, dict[str, Any]]:
    """The figures without those that the page does not use: of families that are gone, and of refused architectures
    that no model of the cookbook has."""
    parts = {text_part(each.model_type) for each in verdicts(figures, cookbook) if not each.trains}
    refused = {part: said for part, said in figures.get(REFUSED, {}).items() if part in parts}
    return {family: dict(figures[family]) for family in TRIED if family in figures} | {REFUSED: refused}


def verdicts(figures: Figures, cookbook: Cookbook) -> list[Verdict]:
    """One for each model of the cookbook, in its order. A model trains if the tests of a family with its `model_type`
    have left their figures."""
    taken = {TRIED[family]["model_type"] for family in TRIED if "logprob" in figures.get(family, {})}
    refused = figures.get(REFUSED, {})
    found = []
    for model, renderers in cookbook.models.items():
        model_type = model_type_of(model)
        if model_type is None:
            found.append(Verdict(model, renderers[0], "", False, UNKNOWN))
            continue
        trains = SAME_CLASS.get(model_type, model_type) in taken
        found.append(Verdict(model, renderers[0], model_type, trains, "" if trains else _why(model_type, refused)))
    return found


def family_of(model_type: str) -> str | None:
    """The first family whose tiny model has this type."""
    known = SAME_CLASS.get(model_type, model_type)
    return next((family for family, settings in TRIED.items() if settings["model_type"] == known), None)


def _why(model_type: str, refused: Mapping[str, str]) -> str:
    """Why the trainer does not take models of this type."""
    known = SAME_CLASS.get(model_type, model_type)
    if known not in CONFIG_MAPPING:
        newer = f"; {NEWER[known]} has one" if known in NEWER else ""
        return f"transformers {transformers.__version__} has no class for it{newer}"
    part = text_part(model_type)
    try:
        check_config("", AutoConfig.for_model(known))
    except ConfigError as error:
        return str(error).removeprefix(f"base_model:  ({part}) ")
    return refused.get(part, "no test tries it")


def text_part(model_type: str) -> str:
    """The `model_type` of the language model in a model of this type, as transformers has it."""
    known = SAME_CLASS.get(model_type, model_type)
    return AutoConfig.for_model(known).get_text_config().model_type if known in CONFIG_MAPPING else known


def _families(measured: Figures) -> str:
    """One row for families with the same figure."""
    alike: dict[str, list[str]] = {}
    for family, each in measured.items():
        alike.setdefault(_vllm(each), []).append(f"{ROWS.get(family, family)} (`{TRIED[family]['model_type']}`)")
    return _table(["families, and `model_type`", "vLLM"], ([", ".join(names), gap] for gap, names in alike.items()))


def _adapted(measured: Figures) -> str:
    """One row for families that adapt the same layers."""
    alike: dict[tuple[str, str], list[str]] = {}
    for family, each in measured.items():
        adapted = each.get("adapted", {})
        cells = (_names(adapted.get("train_attn", ())), _names(adapted.get("train_mlp", ())))
        alike.setdefault(cells, []).append(re.sub(r" \[.*", "", ROWS.get(family, family)))
    rows = [[", ".join(dict.fromkeys(names)), *cells] for cells, names in alike.items()]
    return _table(["families", "`train_attn`", "`train_mlp`"], rows)


def _cookbook(found: Sequence[Verdict], sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for models of which the same is said."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        model_type = f"`{each.model_type}`" if each.model_type else "?"
        cells = (model_type, f"`{each.renderer}`", _answer(each), *_sessions(sessions.get(each.model, {})))
        alike.setdefault(cells, []).append(f"`{each.model}`")
    rows = [[", ".join(models), *cells] for cells, models in alike.items()]
    return _table(["models", "`model_type`", "renderer", "trains", "chats", "loops of tools", "user's turns"], rows)


def _sessions(each: Mapping[str, Any]) -> list[str]:
    """Where a model's chats come from, and what becomes of turns of its agent sessions."""
    if not each:
        return ["not tried", "?", "?"]
    switches = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in each.get("switches", {}).items())
    source = each["source"].removeprefix("the template of ").replace("its own template", "own")
    chats = "; ".join(part for part in (source, f"with {switches}" if switches else "") if part)
    return [chats or "–", *(_turns(each[name]) for name in ("tool_loops", "user_turns"))]


def _turns(said: str) -> str:
    return SHORT.get(said, said)


def _exact(found: Sequence[Verdict], sessions: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return str(sum(sessions.get(each.model, {}).get(name) == "exact" for each in found))


def _beyond(found: Sequence[Verdict], sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """Of models that the cookbook does not know."""
    models = {each.model for each in found}
    rows = [[f"`{model}`", *_sessions(each)] for model, each in sessions.items() if model not in models]
    return _table(["models", "chats", "loops of tools", "user's turns"], rows)


def _answer(verdict: Verdict) -> str:
    return "yes" if verdict.trains else f"no: {verdict.why}"


def _dtype(each: Mapping[str, Any]) -> str | None:
    """The type that vLLM computes the family in; None if it does not serve the family here."""
    return each.get("vllm", {}).get("dtype")


def _gap(each: Mapping[str, Any]) -> float | None:
    return max(each["vllm"]["gaps"].values()) if _dtype(each) else None


def _vllm(each: Mapping[str, Any]) -> str:
    dtype = _dtype(each)
    if dtype in (None, "float32"):
        return _shown(_gap(each))
    means = each["vllm"].get("means", {})
    average = f"{_shown(max(means.values()))} on average, " if means else ""
    return f"{average}{_shown(_gap(each))} at most, in {dtype}"


def _names(leaves: Iterable[str]) -> str:
    """`a.{b,c}_proj` for names that differ in the part before the last underscore alone."""
    alike: dict[tuple[str, str], list[str]] = {}
    for leaf in leaves:
        path, dot, name = leaf.rpartition(".")
        stem, score, end = name.rpartition("_")
        alike.setdefault((path + dot, score + end), []).append(stem)
    shown = [f"{{{','.join(stems)}}}" if len(stems) > 1 else stems[0] for stems in alike.values()]
    return ", ".join(f"`{path}{stem}{end}`" for (path, end), stem in zip(alike, shown, strict=True)) or "–"


def _shown(number: float | None) -> str:
    """One digit: the second one changes with the processor."""
    if number is None:
        return "–"
    return f"{number:.1g}" if number >= 0.01 else f"{number:.0e}".replace("e-0", "e-")


def _largest(numbers: Iterable[float | None]) -> str:
    return _shown(max((number for number in numbers if number is not None), default=None))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = f"|{'---|' * len(header)}"
    first, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first, rule, *others])
