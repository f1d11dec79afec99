"""The parsers of released models: an answer that the released template writes is read back, whole and streamed.

Each template renders an answer with thoughts and calls. What stands behind the prompt is the model's answer, and vLLM's
parsers must give back what went in. The tokenizer is one of single bytes, with the markers as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl.inference.parsers import ONE_LLAMA_CALL, WRITTEN_THOUGHTS, parsers_of
from tests.released_templates import CannotFetch, released_templates
from tests.unit.inference.reading import ENDS, Read, read, tokenizer_of, use_plugin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

THOUGHTS, TEXT, LAST = "Hm, let me see.", "I look.", "It is fine."
CALLS = (("weather", {"city": "Rome", "days": 2}), ("tides", {"city": "Oslo", "days": 1}))
IDS = ("call00000", "call00001")
"""Of the length that Mistral's templates want."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Which."},
        "days": {"type": "integer", "description": "How many."},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {name}.", "parameters": PARAMETERS}}
    for name, _ in CALLS
]
THINKS = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
"""What makes one template or another think."""


THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin")
)
KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
HY = tuple(
    f"<{slash}{name}:opensource>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_sep")
    for slash in ("", "/")
)
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_NEW = (*MISTRAL, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
MINICPM = ("<function", "</function>", "<param", "</param>")


def functions(calls: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


def lfm(calls: Sequence[tuple[str, Any]]) -> str:
    return f"<|tool_call_start|>[{functions(calls)}]<|tool_call_end|>"


def granite(calls: Sequence[tuple[str, Any]]) -> str:
    return "<|tool_call|>" + json.dumps([{"name": name, "arguments": given} for name, given in calls])


def kimi(calls: Sequence[tuple[str, Any]]) -> str:
    inner = "".join(
        f"{KIMI[2]}functions.{name}:{number}{KIMI[4]}{json.dumps(given)}{KIMI[3]}"
        for number, (name, given) in enumerate(calls)
    )
    return f"{KIMI[0]}{inner}{KIMI[1]}"


def deepseek(calls: Sequence[tuple[str, Any]]) -> str:
    inner = "\n".join(
        f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{name}\n```json\n{json.dumps(given)}\n```{DEEPSEEK[3]}"
        for name, given in calls
    )
    return f"{DEEPSEEK[0]}{inner}{DEEPSEEK[1]}"


@dataclass(frozen=True)
class Model:
    """A released template. `kind` is the `model_type` of its models, `markers` are tokens of theirs. `arguments` are
    those of the template."""

    kind: str
    calls: str | None
    thoughts: str | None = None
    markers: tuple[str, ...] = ()
    arguments: Mapping[str, Any] | None = None
    written: str | None = None
    """How the model writes thoughts (`{}`), where the template leaves those of an answer out."""
    writes: Callable[[Sequence[tuple[str, Any]]], str] | None = None
    """How the model writes calls, where the template leaves them out, or fails on them in vLLM."""
    most: int = 2
    """Calls in one answer."""
    keeps_text: bool = True
    """Whether the text beside calls is read back: False if the template leaves it out or writes it behind the calls."""
    read: bool = True
    """Whether there is something to read here."""


NONE = Model("", None, read=False)
"""vLLM has no parser, or the template has neither calls nor thoughts."""
LAGUNA = Model("laguna", "poolside_v1", "poolside_v1", (*THINK, *CALL, *PAIRS, "<assistant>"), THINKS)
GEMMA_4 = Model("gemma4", "gemma4", "gemma4", GEMMA, THINKS, "<|channel>thought\n{}<channel|>", keeps_text=False)
GRANITE_4 = Model("granitemoehybrid", "granite4", None, CALL)
LLAMA = Model("llama", ONE_LLAMA_CALL, None, ("<|python_tag|>",), most=1, keeps_text=False)
HERMES = Model("llama", "hermes", None, CALL, keeps_text=False)
R1 = Model("qwen2", "deepseek_v3", "deepseek_r1", (*THINK, *DEEPSEEK), THINKS, "{}\n</think>\n\n", keeps_text=False)
MODELS: Mapping[str, Model] = {
    "Apertus-8B-Instruct": Model("apertus", "apertus", None, ("<|tools_prefix|>", "<|tools_suffix|>")),
    "Apriel-1.6-15b-Thinker-fixed": NONE,
    "Bielik-11B-v3.0-Instruct": Model("llama", "hermes", WRITTEN_THOUGHTS, (*THINK, *CALL), THINKS),
    "ByteDance-Seed-OSS": Model(
        "seed_oss",
        "seed_oss",
        "seed_oss",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    "Cohere2MoE": Model("cohere2_moe", None, read=False),
    "CohereForAI-c4ai-command-r-plus-tool_use": Model("cohere", None, read=False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Model("cohere2", None, read=False),
    "GLM-4.6": Model("glm4_moe", "glm47", "glm47", (*THINK, *CALL, *PAIRS)),
    "GLM-4.7-Flash": Model("glm4_moe_lite", "glm47", "glm47", (*THINK, *CALL, *PAIRS)),
    "GigaChat3-10B-A1.8B": Model("deepseek_v3", "gigachat3", None, ("<|role_sep|>", "<|message_sep|>"), most=1),
    "GigaChat3.1-10B-A1.8B": Model("deepseek_v3", "gigachat3", None, ("<|role_sep|>", "<|function_call|>"), most=1),
    "HuggingFaceTB-SmolLM3-3B": Model(
        "smollm3", None, WRITTEN_THOUGHTS, THINK, None, "<think>\n{}\n</think>\n", most=0
    ),
    "Kimi-K2-Instruct": Model("kimi_k2", "kimi_k2", None, KIMI, writes=kimi),
    "Kimi-K2-Thinking": Model("kimi_k2", "kimi_k2", "kimi_k2", (*THINK, *KIMI), None, "<think>{}</think>", kimi),
    "Kimi-K3": Model("kimi_k3", "kimi_k3", "kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    "LFM2-8B-A1B": Model("lfm2_moe", "lfm2", None, ("<|tool_call_start|>", "<|tool_call_end|>"), writes=lfm),
    "LFM2.5-8B-A1B": Model(
        "lfm2_moe",
        "lfm2",
        WRITTEN_THOUGHTS,
        (*THINK, "<|tool_call_start|>", "<|tool_call_end|>"),
        None,
        "<think>{}</think>",
    ),
    "LFM2.5-Instruct": Model(
        "lfm2",
        "lfm2",
        WRITTEN_THOUGHTS,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        None,
        "<think>{}</think>",
        lfm,
    ),
    "MiMo-VL": Model("qwen2_5_vl", "hermes", WRITTEN_THOUGHTS, CALL, None, "<think>\n{}\n</think>\n"),
    "MiniMax-M1": Model("minimax_m1", None, read=False),
    "MiniMax-M2": Model(
        "minimax_m2", "minimax_m2", "minimax_m2", (*THINK, "<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "MiniMax-M3": Model("minimax_m3_vl", "minimax_m3", "minimax_m3", ("<mm:think>", "</mm:think>", "]<]minimax[>[")),
    "Mistral-Small-3.2-24B-Instruct-2506": Model("mistral3", "mistral", None, MISTRAL_NEW[:-2], keeps_text=False),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Model("nemotron_h", "qwen3_coder", "nemotron_v3", (*THINK, *CALL)),
    "NVIDIA-Nemotron-Nano-v2": Model("nemotron_h", None, "nemotron_v3", THINK, None, "{}\n</think>\n", most=0),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-QwQ-32B": Model("qwen2", "hermes", "deepseek_r1", (*THINK, *CALL), THINKS, "{}\n</think>\n\n"),
    "Qwen-Qwen2.5-7B-Instruct": Model("qwen2", "hermes", None, CALL),
    "Qwen-Qwen3-0.6B": Model("qwen3", "hermes", "qwen3", (*THINK, *CALL)),
    "Qwen3-Coder": Model("qwen3_moe", "qwen3_coder", None, CALL),
    "Qwen3.5-4B": Model("qwen3_5", "qwen3_coder", "qwen3", (*THINK, *CALL)),
    "Reka-Edge": NONE,
    "Spark2.5": NONE,
    "StepFun3.5-Flash": Model("step3p5", "step3p5", "step3p5", (*THINK, *CALL)),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Model(
        "llama", "deepseek_v3", "deepseek_r1", (*THINK, *DEEPSEEK), None, "{}\n</think>\n\n", deepseek
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": R1,
    "deepseek-ai-DeepSeek-V3.1": Model(
        "deepseek_v3", "deepseek_v31", "deepseek_v3", (*THINK, *DEEPSEEK), THINKS, "{}</think>"
    ),
    "deepseek-ai-DeepSeek-V3.2": Model("deepseek_v32", "deepseek_v32", "deepseek_v3", read=False),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Model("deepseek_v4", "deepseek_v4", "deepseek_v4", read=False),
    "deepseek-ai-DeepSeek-V4": Model("deepseek_v4", "deepseek_v4", "deepseek_v4", read=False),
    "fireworks-ai-llama-3-firefunction-v2": Model("llama", None, read=False),
    "google-gemma-2-2b-it": Model("gemma2", None, read=False),
    "google-gemma-4-31B-it-interleaved": GEMMA_4,
    "google-gemma-4-31B-it": GEMMA_4,
    "ibm-granite-granite-3.3-2B-Instruct": Model("granite", "granite", None, ("<|tool_call|>",), writes=granite),
    "ibm-granite-granite-4.0": GRANITE_4,
    "ibm-granite-granite-4.1": GRANITE_4,
    "inclusionai-ling-3.0-flash": Model("bailing_hybrid", "ling3", "ling3", (*THINK, *CALL, *PAIRS), THINKS),
    "llama-cpp-deepseek-r1": Model("deepseek_v3", "deepseek_v3", "deepseek_r1", read=False),
    "llama-cpp-rwkv-world": NONE,
    "meetkai-functionary-medium-v3.1": Model("llama", None, read=False),
    "meetkai-functionary-medium-v3.2": Model("llama", None, read=False),
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "microsoft-Phi-3.5-mini-instruct": Model("phi3", None, read=False),
    "mistralai-Ministral-3-14B-Reasoning-2512": Model(
        "mistral3", "mistral", "mistral", MISTRAL_NEW, None, "[THINK]{}[/THINK]"
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Model("mistral", "mistral", None, MISTRAL, keeps_text=False),
    "moonshotai-Kimi-K2": Model("kimi_k2", "kimi_k2", None, KIMI),
    "muse-glimmer": Model(
        "muse_glimmer", "muse_glimmer", "muse_glimmer", ("<|start|>", "<|message|>", "<|eom|>"), keeps_text=False
    ),
    "openai-gpt-oss-120b": Model("gpt_oss", "openai", "openai_gptoss", read=False),
    "openbmb-MiniCPM5-1B": Model("llama", "minicpm5", WRITTEN_THOUGHTS, (*THINK, *MINICPM), keeps_text=False),
    "poolside-Laguna-S-2.1": LAGUNA,
    "poolside-Laguna-XS-2.1": LAGUNA,
    "poolside-Laguna-XS.2": LAGUNA,
    "tencent-Hy3": Model("hy_v3", "hy_v3", "hy_v3", HY, THINKS),
    "unsloth-Apriel-1.5": NONE,
    "unsloth-mistral-Devstral-Small-2507": Model("mistral", "mistral", None, MISTRAL_NEW[:-2]),
    "upstage-Solar-Open-100B": Model("solar_open", None, read=False),
}
"""Apriel, Reka Edge, Spark and RWKV are no architectures of vLLM 0.32. gpt-oss is read with OpenAI's own vocabulary,
which is fetched, and the templates of DeepSeek-V3.2 and -V4 are not what vLLM renders."""


@pytest.fixture(scope="module")
def templates() -> Path:
    try:
        return released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    use_plugin()


def test_every_released_template_has_its_parsers(templates: Path) -> None:
    assert sorted(MODELS) == sorted(file.stem for file in templates.glob("*.jinja"))
    chosen = {name: parsers_of(model.kind, (templates / f"{name}.jinja").read_text()) for name, model in MODELS.items()}
    assert chosen == {name: (model.calls, model.thoughts) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.read])
def test_an_answer_is_read_back(templates: Path, name: str) -> None:
    model = MODELS[name]
    template = (templates / f"{name}.jinja").read_text()
    if model.most:
        one, more = (answered(model, template, text, number) for text, number in ((None, 1), (TEXT, model.most)))
        assert one == (said(model), None, [*CALLS[:1]])
        assert more == (said(model), TEXT if model.keeps_text else None, [*CALLS[: model.most]])
    assert answered(model, template, LAST, 0) == (said(model), LAST, [])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.thoughts == WRITTEN_THOUGHTS])
def test_an_answer_without_thoughts_is_content(templates: Path, name: str) -> None:
    template = (templates / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(MODELS[name].markers, special=False)
    prompt = rendered(tokenizer, template, None, {})
    parsers = (MODELS[name].calls, WRITTEN_THOUGHTS)
    assert read(parsers, tokenizer, TOOLS, LAST, prompt=prompt) == (None, LAST, [])
    assert read(parsers, tokenizer, TOOLS, "Hm", prompt=f"{prompt}<think>\n") == ("Hm", None, [])
    assert read(parsers, tokenizer, TOOLS, LAST, prompt=f"{prompt}<think>\n\n</think>\n\n") == (None, LAST, [])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model is LLAMA])
def test_of_several_calls_that_the_template_refuses_the_first_is_given(templates: Path, name: str) -> None:
    template = (templates / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(LLAMA.markers, special=False)
    with pytest.raises(Exception, match="only supports single tool-calls"):
        rendered(tokenizer, template, (None, None, CALLS), {})
    prompt = rendered(tokenizer, template, None, {})
    answer = "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in CALLS)
    seen = read((ONE_LLAMA_CALL, None), tokenizer, TOOLS, answer, prompt=prompt)
    assert seen is not None
    assert seen == (None, None, [CALLS[0]])
    assert rendered(tokenizer, template, (None, None, seen[2]), {}).startswith(prompt)


def said(model: Model) -> str | None:
    return None if model.thoughts is None else THOUGHTS


def answered(model: Model, template: str, text: str | None, calls: int) -> Read:
    """Thoughts, text and calls that vLLM reads in an answer as the model writes it."""
    arguments = dict(model.arguments or {})
    for special in (True, False):
        tokenizer = tokenizer_of(model.markers, special=special)
        prompt = rendered(tokenizer, template, None, arguments)
        shown = () if model.writes else CALLS[:calls]
        whole = rendered(tokenizer, template, (said(model), text, shown), arguments)
        left_out = model.written is not None and THOUGHTS not in whole
        begun = without_thoughts(prompt) if left_out and not whole.startswith(prompt) else prompt
        assert whole.startswith(begun), (begun[-99:], whole[-999:])
        answer = whole[len(begun) :]
        if model.written and left_out:
            answer = model.written.format(THOUGHTS) + answer.removeprefix("<think>").removeprefix("</think>")
        answer = ended(answer)
        if model.writes and calls:
            answer += model.writes(CALLS[:calls])
        read_after = partial(
            read,
            (model.calls, model.thoughts),
            tokenizer,
            TOOLS,
            answer,
            arguments=arguments,
            special=special,
            whole_text=model.keeps_text,
        )
        seen = read_after(prompt=prompt)
        if seen is not None:
            later = f"{prompt}{answer}{whole[len(begun) :].removeprefix(answer)}{prompt}"
            assert read_after(prompt=later) == seen, "after an earlier answer"
            return seen
    raise AssertionError("no tokenizer fits")


def without_thoughts(prompt: str) -> str:
    """The prompt without the beginning of thoughts at its end."""
    for mark in ("<think>", "<|channel>"):
        if (at := prompt.rfind(mark)) > len(prompt) - 40:
            return prompt[:at]
    return prompt


def ended(answer: str) -> str:
    answer = answer.removesuffix("<|message_sep|>\n\n")
    ends = [at for end in ENDS if (at := answer.find(end)) >= 0]
    return answer[: min(ends)] if ends else answer


def rendered(
    tokenizer: Any, template: str, answer: tuple[str | None, str | None, Sequence[Any]] | None, arguments: Any
) -> str:
    """The text of a question, with the beginning of an answer or with the whole `answer`, as vLLM renders it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
    if answer is not None:
        thoughts, text, calls = answer
        message: dict[str, Any] = {"role": "assistant", "content": text or ""}
        if thoughts is not None:
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls:
            message["tool_calls"] = [
                {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
                for number, (name, given) in zip(IDS, calls, strict=False)
            ]
        messages.append(message)
    return tokenizer.apply_chat_template(
        messages, TOOLS, chat_template=template, tokenize=False, add_generation_prompt=answer is None, **arguments
    )
