"""How many tokens a picture takes, against transformers' own processor; which models see, and why others do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import Qwen2VLImageProcessor

from skyrl.base.pictures.picture import BadPicture
from skyrl.base.pictures.vision import SEES, NoVision, VisionConfig
from skyrl.base.tiny import model_path

RELEASED = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
}
"""As Qwen3-VL and Qwen3.5 were released."""
SETTINGS: dict[str, dict[str, Any]] = {
    "released": RELEASED,
    "tiny": {**RELEASED, "size": {"longest_edge": 64 * 64, "shortest_edge": 32 * 32}},
    "bounds that are no multiples": {**RELEASED, "size": {"longest_edge": 5000, "shortest_edge": 3001}},
    "one side only": {**RELEASED, "size": {"longest_edge": 1025, "shortest_edge": 1}},
    "Qwen2-VL": {**RELEASED, "patch_size": 14, "size": {"longest_edge": 28 * 28 * 1280, "shortest_edge": 56 * 56}},
    "old names": {**RELEASED, "size": None, "min_pixels": 3136, "max_pixels": 12_845_056},
    "old names beside new ones": {**RELEASED, "min_pixels": 4000, "max_pixels": 70_000},
}

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a model's small files and returns its directory. A file of None is left out."""

    def write(config: dict[str, Any] | None = None, **files: dict[str, Any] | None) -> str:
        values = {"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "image_token_id": 151_655, **(config or {})}
        for name, content in {"config": values, "preprocessor_config": RELEASED, **files}.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path)

    return write


def sizes() -> Iterator[tuple[int, int]]:
    """Width and height: edges, then thousands drawn."""
    yield from ((1, 1), (1, 200), (200, 1), (16, 3200), (10_000, 50), (31, 33), (48, 80), (32, 32), (8000, 8000))
    rng = Random(34)
    for _ in range(3000):
        width = round(math.exp(rng.uniform(0, math.log(9000))))
        yield width, max(1, min(round(width * math.exp(rng.uniform(-5.2, 5.2))), 60_000))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_as_many_tokens_as_transformers_processor_gives(settings: dict[str, Any], make: Make) -> None:
    model = make(preprocessor_config=settings)
    sight, processor = VisionConfig.of(model), Qwen2VLImageProcessor.from_pretrained(model)
    counted = 0
    for width, height in sizes():
        try:
            patches = processor.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(BadPicture, match="at most 200 times"):
                sight.tokens(width, height)
            continue
        assert sight.tokens(width, height) == patches // processor.merge_size**2, (width, height)
        counted += 1
    assert counted > 2500


def test_pixels_go_through_the_processor_to_as_many_tokens(make: Make) -> None:
    """get_number_of_image_patches is a forecast; this is what the processor does."""
    from PIL import Image

    model = make(preprocessor_config=SETTINGS["tiny"])
    sight, processor = VisionConfig.of(model), Qwen2VLImageProcessor.from_pretrained(model)
    for size in ((1, 1), (100, 30), (640, 480), (7, 900)):
        _, rows, columns = processor([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert sight.tokens(*size) == rows * columns // processor.merge_size**2


@pytest.mark.parametrize("size", [(1, 201), (10_000, 49), (10_000, 1)])
def test_a_picture_that_the_processor_finds_too_long_is_refused(size: tuple[int, int], make: Make) -> None:
    with pytest.raises(BadPicture, match=rf"is {size[0]} x {size[1]} pixels: the longer side may be at most 200 times"):
        VisionConfig.of(make()).tokens(*size)


@pytest.mark.parametrize("model_type", sorted(SEES))
def test_models_that_see(model_type: str, make: Make) -> None:
    sight = VisionConfig.of(make({"model_type": model_type, "image_token_id": 7}))
    assert sight == VisionConfig(model_type, 7, patch=16, merge=2, min_pixels=65_536, max_pixels=16_777_216)


def test_settings_inside_processor_config_come_first(make: Make) -> None:
    nested = {**RELEASED, "image_processor_type": "Qwen2VLImageProcessor", "size": SETTINGS["tiny"]["size"]}
    model = make(processor_config={"processor_class": "Qwen3VLProcessor", "image_processor": nested})
    assert VisionConfig.of(model).max_pixels == 64 * 64
    assert Qwen2VLImageProcessor.from_pretrained(model).size["longest_edge"] == 64 * 64


def test_a_processor_config_without_image_settings_leaves_the_other_file(make: Make) -> None:
    assert VisionConfig.of(make(processor_config={"processor_class": "Qwen3VLProcessor"})).max_pixels == 16_777_216


BLIND = {
    "text": ({"config": {"vision_config": None, "model_type": "qwen3"}}, r"it is a model of text \(qwen3\)"),
    "another family": (
        {"config": {"model_type": "kimi_k25"}},
        "no pictures for models of type kimi_k25, only for qwen3_5,",
    ),
    "no settings": ({"preprocessor_config": None}, "processor_config.json or preprocessor_config.json"),
    "another processor": (
        {"preprocessor_config": {**RELEASED, "image_processor_type": "CLIPImageProcessor"}},
        "its image processor is CLIPImageProcessor",
    ),
    "no resizing": ({"preprocessor_config": {**RELEASED, "do_resize": False}}, "do_resize = false"),
    "no patch": ({"preprocessor_config": {**RELEASED, "patch_size": None}}, "name no patch_size"),
    "no size": ({"preprocessor_config": {**RELEASED, "size": None}}, "name no min_pixels"),
    "no token": ({"config": {"image_token_id": None}}, "config.json name no image_token_id"),
}


@pytest.mark.parametrize(("files", "reason"), BLIND.values(), ids=BLIND)
def test_a_model_that_does_not_see_says_why(files: dict[str, Any], reason: str, make: Make) -> None:
    with pytest.raises(NoVision, match=reason):
        VisionConfig.of(make(**files))


def test_a_model_that_is_not_here_is_blind() -> None:
    with pytest.raises(NoVision, match="config.json is not on this machine"):
        VisionConfig.of("nobody/has-this-model")


def test_the_tiny_model_of_text_is_blind() -> None:
    with pytest.raises(NoVision, match="model of text"):
        VisionConfig.of(str(model_path()))


def test_a_directory_that_is_missing_is_no_model_of_the_hub() -> None:
    with pytest.raises(NoVision, match=r"its config\.json is not on this machine"):
        VisionConfig.of("/nowhere/at/all")
