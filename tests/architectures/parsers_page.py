"""docs/reference/parsers.md: the parsers of released models, made from `tests.unit.inference.released_models`."""

from __future__ import annotations

from tests.environments import ROOT
from tests.unit.inference.released_models import COOKBOOK, MODELS

PAGE = ROOT / "docs" / "reference" / "parsers.md"
_HEAD = """\
# Parsers of released models

Which of vLLM 0.32's parsers `skyrl serve` chooses, by the model's released chat template and `model_type`
([the rule](../howto/openai.md#tools-and-thoughts)). `make tables` writes this page. [Which of these models train
here](architectures.md#the-cookbooks-models) is on another page.

Each line has the parsers of calls and of thoughts, and the models that get them. *Read back*: the released template has
written an answer with thoughts, a text and calls, and the parsers gave back what went in, whole and streamed
(`tests/unit/inference/test_released_parsers.py`). *Not tried*: the template was not at hand, or is not what vLLM
renders; the parser follows from the family's format. A stroke: no parser, so tools are refused, or thoughts stay in the
text; both strokes also for base models without a template.

## The cookbook's models

{cookbook}

The same parsers serve the other models of these families. Not in the tables are, of calls and of thoughts:
Qwen2.5-Coder `hermes`, which [leaves bare JSON in the text](../howto/openai.md#calls-in-bare-json); Llama 3 and 4
`llama3_json` and `llama4_json` with a template that takes several calls, `pythonic` and `llama4_pythonic` with one that
asks for calls in Python; OLMo 3 `olmo3` for both; Phi-4-mini `phi4_mini_json`; Granite 4.2 `qwen3_coder`,
`granite_thinking_parser`; FunctionGemma `functiongemma`; MiMo-V2 `mimo`, Hunyuan-A13B `hunyuan_a13b` and ERNIE 4.5
`ernie45` for both; LongCat-Flash `longcat`; Jamba `jamba`.
vLLM renders chats of DeepSeek-V3.2, -V4 and -V4.1, Kimi K3 and Inkling with code of its own: their parsers go by
`model_type` alone.

## Released templates

Out of llama-cpp-python 0.3.36.

{released}

What is lost, because vLLM has no parser for it:

- calls of functionary, Firefunction, Solar Open, MiniMax-M1, Nemotron Nano v2, Apriel and Command R; Cohere's need the
  package `cohere_melody`, which vLLM does not install;
- of GigaChat 3 and Llama 3.1 to 3.3, all calls of an answer but the first. Their templates show one;
- text behind the calls of an answer of Gemma 4, and text beside calls of MiniCPM5, in answers that are not streamed.

DeepSeek-V3.1, -R1 and its distillations read calls, but their templates do not show tools to the model: write the tools
into the system message, as their model cards say, and send them as `tools`, too.
"""


def render() -> str:
    """The whole page."""
    cookbook = [(f"`{model}`", *_found(given)) for model, given in COOKBOOK.items()]
    released = [
        (name, model.calls, model.thoughts, model.read)
        for name, model in sorted(MODELS.items(), key=lambda item: item[0].lower())
    ]
    return _HEAD.format(cookbook=_lists(cookbook), released=_lists(released))


def _found(given: str | tuple[str | None, str | None] | None) -> tuple[str | None, str | None, bool]:
    if isinstance(given, str):
        return MODELS[given].calls, MODELS[given].thoughts, MODELS[given].read
    calls, thoughts = given or (None, None)
    return calls, thoughts, False


def _lists(rows: list[tuple[str, str | None, str | None, bool]]) -> str:
    """What was read back, then what was not tried: one line for names with the same parsers."""
    parts = []
    for title, wanted in (("Read back", True), ("Not tried", False)):
        alike: dict[str, list[str]] = {}
        for name, *parsers, read in rows:
            if read == wanted:
                alike.setdefault(" and ".join(f"`{each}`" if each else "–" for each in parsers), []).append(name)
        parts.append(f"*{title}:*\n\n" + "\n".join(f"- {said}: {', '.join(names)}" for said, names in alike.items()))
    return "\n\n".join(parts)
