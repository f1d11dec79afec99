"""The models that the installed cookbook knows, and the `model_type` of their configurations.

The cookbook is in an environment of its own (`requirements/cookbook.txt`). Its table names models by their hub names,
without configurations, so a small table here gives the `model_type` by a pattern of the name. Knows nothing of what the
trainer takes.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.environments import ROOT, environment

LISTING = Path(__file__).with_name("cookbook.json")
"""What `installed` returned when the page was made."""

MODEL_TYPES = (
    (r"meta-llama/Llama-3\.[1-3]-", "llama"),
    (r"Qwen/Qwen3-VL-\d+B-A\d+B", "qwen3_vl_moe"),
    (r"Qwen/Qwen3-\d+B-A\d+B", "qwen3_moe"),
    (r"Qwen/Qwen3-\d+B(?!-A\d)", "qwen3"),
    (r"Qwen/Qwen3\.[568]-\d+B-A\d+B", "qwen3_5_moe"),
    (r"Qwen/Qwen3\.[568]-\d+B(?!-A\d)", "qwen3_5"),
    (r"deepseek-ai/DeepSeek-V3\.1", "deepseek_v3"),
    (r"deepseek-ai/DeepSeek-V4\.1", "deepseek_v41"),
    (r"openai/gpt-oss-", "gpt_oss"),
    (r"moonshotai/Kimi-K2-", "kimi_k2"),
    (r"moonshotai/Kimi-K2\.[56]", "kimi_k25"),
    (r"moonshotai/Kimi-K3", "kimi_k3"),
    (r"zai-org/GLM-5\.3-Flash", "glm5_next"),
    (r"zai-org/GLM-5\.3", "glm_moe_dsa"),
    (r"nvidia/NVIDIA-Nemotron-3\S*-VL-", "nemotron_h_omni"),
    (r"nvidia/NVIDIA-Nemotron-3", "nemotron_h"),
    (r"thinkingmachines/Inkling-2", "inkling2"),
    (r"thinkingmachines/Inkling", "inkling_mm_model"),
)
"""The first pattern that matches the beginning of a model's name gives its `model_type`."""

_PROGRAM = """
import json
from importlib.metadata import version
from tinker_cookbook import model_info

models = {}
for name, table in vars(model_info).items():
    if name.startswith("get_") and name.endswith("_info"):
        for model, about in table().items():
            models[f"{about.organization}/{model}"] = list(about.recommended_renderers)
print(json.dumps({"version": version("tinker-cookbook"), "models": models}))
"""


@dataclass(frozen=True)
class Cookbook:
    """A release of the cookbook. `models`: the renderers that it recommends for each model, the first one first."""

    version: str
    models: dict[str, list[str]]


def installed() -> Cookbook:
    """What the release that `requirements/cookbook.txt` pins knows. Makes its environment if there is none."""
    python = environment(ROOT / "requirements" / "cookbook.txt")
    done = subprocess.run([python, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    return Cookbook(**json.loads(done.stdout))


def listed() -> Cookbook:
    """What the page is made from."""
    return Cookbook(**json.loads(LISTING.read_text()))


def write(cookbook: Cookbook) -> None:
    LISTING.write_text(json.dumps({"version": cookbook.version, "models": cookbook.models}, indent=1) + "\n")


def model_type_of(model: str) -> str | None:
    """The `model_type` of a model's configuration, by the model's name; None if no pattern matches."""
    return next((model_type for pattern, model_type in MODEL_TYPES if re.match(pattern, model)), None)
