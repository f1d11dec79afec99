"""Which base models see, and how many tokens a picture takes in their prompts.

Reads config.json and the settings of the image processor. Imports no library for images and no transformers, so that
the API and the command line can ask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from skyrl.base.model_files import json_of
from skyrl.base.pictures.picture import BadPicture

SEES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Model types whose pictures this server takes, for samples and for training."""

MAX_ASPECT = 200
"""The processor refuses a picture whose longer side is more than this many times the shorter one."""

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names under which the settings name the image processor whose sizes `VisionConfig.tokens` computes."""


@dataclass(frozen=True)
class VisionConfig:
    """How a base model sees. A picture is resized so that both sides are multiples of `patch * merge` and its area is
    in [min_pixels, max_pixels]; `(patch * merge)**2` pixels are one token. `image_token_id` stands for each of its
    tokens in a prompt."""

    model_type: str
    image_token_id: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, base_model: str) -> Self:
        """Of a directory, or of a model of the hub that is on this machine. Raises NoVision."""
        config = json_of(base_model, "config.json")
        if not config:
            raise NoVision("its config.json is not on this machine")
        model_type = config.get("model_type")
        if not config.get("vision_config"):
            raise NoVision(f"it is a model of text ({model_type})")
        if model_type not in SEES:
            raise NoVision(f"this server takes no pictures for models of type {model_type}, only for {_listed(SEES)}")
        settings = _processor_settings(base_model)
        size = settings.get("size") or {}
        return cls(
            model_type=str(model_type),
            image_token_id=_positive(config.get("image_token_id"), "config.json", "image_token_id"),
            patch=_positive(settings.get("patch_size"), _SETTINGS, "patch_size"),
            merge=_positive(settings.get("merge_size"), _SETTINGS, "merge_size"),
            min_pixels=_positive(settings.get("min_pixels") or size.get("shortest_edge"), _SETTINGS, "min_pixels"),
            max_pixels=_positive(settings.get("max_pixels") or size.get("longest_edge"), _SETTINGS, "max_pixels"),
        )

    def tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of this size in pixels takes. Raises BadPicture if the processor refuses it.

        The rule is Qwen2-VL's "smart resize", as transformers documents it: each side is rounded to a multiple of
        `patch * merge` (a half to the even one). If the area is then above max_pixels, both sides are scaled so that
        the picture's own area is max_pixels, and rounded down (to one multiple at least); if it is below min_pixels,
        scaled up to min_pixels and rounded up.
        """
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise BadPicture(
                f"is {width} x {height} pixels: the longer side may be at most {MAX_ASPECT} times the shorter one"
            )
        side = self.patch * self.merge
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif columns * rows * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            columns, rows = math.ceil(width * grow / side), math.ceil(height * grow / side)
        return columns * rows


class NoVision(Exception):
    """The base model takes no pictures. The message says why, as the end of a sentence about the model."""


_SETTINGS = "the settings of its image processor"


def _processor_settings(base_model: str) -> dict[str, Any]:
    """As transformers reads them: nested in processor_config.json, else preprocessor_config.json. Raises NoVision."""
    settings = json_of(base_model, "processor_config.json").get("image_processor")
    settings = settings or json_of(base_model, "preprocessor_config.json")
    if not settings:
        raise NoVision(f"{_SETTINGS} (processor_config.json or preprocessor_config.json) are not on this machine")
    kind = settings.get("image_processor_type")
    if kind not in _PROCESSORS:
        raise NoVision(f"its image processor is {kind}, and this server knows {_PROCESSORS[0]}")
    if settings.get("do_resize") is False:
        raise NoVision(f"{_SETTINGS} have do_resize = false")
    return settings


def _positive(value: Any, file: str, name: str) -> int:
    if type(value) is not int or value < 1:
        raise NoVision(f"{file} name no {name}")
    return value


def _listed(names: frozenset[str]) -> str:
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}"
