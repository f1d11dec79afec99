"""Where chats of a model family are rendered otherwise than by the cookbook's renderers.

A checkpoint that was trained with the cookbook has seen the prompts of a renderer. A chat is rendered with the model's
own template. Compared were tinker-cookbook 0.6.1 and the released templates (docs/howto/openai.md). Knows no request.
"""

from __future__ import annotations

LLAMA = (
    "the template begins each chat with a system message about dates, and cuts blanks off texts; the renderer llama3 "
    "does neither"
)
GPT_OSS = (
    "the template begins each chat with a system message, which the renderer gpt_oss_no_sysprompt leaves out; it also "
    "writes tools' calls and results otherwise, and drops earlier thoughts"
)
QWEN3 = "the template writes the results of several calls into one user's turn, the renderers of Qwen3 one for each"
_LLAMA_DATES = "Cutting Knowledge Date"
_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe")


def difference(model_type: str, template: str | None) -> str | None:
    """How the template of a model differs from the cookbook's renderers, as a sentence; None if it is not known to.
    `model_type` is that of config.json."""
    if model_type == "gpt_oss":
        return GPT_OSS
    if template is None:
        return None
    if model_type == "llama" and _LLAMA_DATES in template:
        return LLAMA
    return QWEN3 if model_type in _QWEN3 and "<tool_response>" in template else None
