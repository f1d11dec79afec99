"""Where the sidecar puts the pictures of a prompt, and which it refuses. A real worker decodes them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from skyrl.base.pictures.picture import digest_of
from skyrl.inference.sidecar.errors import BadRequest, VllmBroke
from skyrl.inference.sidecar.pictures import Pictures, PlacedPictures, as_completion, generate_body
from tests.families import PROCESSOR

IMAGE = 9


def file(width: int, height: int, format: str = "png") -> bytes:
    data = BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(data, format)
    return data.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG, JPEG = file(64, 64), file(64, 32, "jpeg")  # 4 and 2 tokens


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "image_token_id": IMAGE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return str(tmp_path)


@pytest.fixture
async def pictures() -> AsyncIterator[Pictures]:
    made = Pictures()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("given", "prompt", "whole", "short"),
    [
        ([text(PNG)], [1, IMAGE, 2], [1, *[IMAGE] * 4, 2], [1, IMAGE, 2]),
        ([text(PNG)], [1, *[IMAGE] * 4, 2], [1, *[IMAGE] * 4, 2], [1, IMAGE, 2]),
        ([text(JPEG), text(PNG)], [IMAGE, 5, 5, IMAGE], [*[IMAGE] * 2, 5, 5, *[IMAGE] * 4], [IMAGE, 5, 5, IMAGE]),
    ],
    ids=["one token", "all tokens", "two"],
)
async def test_a_run_of_image_tokens_is_the_place_of_a_picture(
    pictures: Pictures, model: str, given: list[str], prompt: list[int], whole: list[int], short: list[int]
) -> None:
    found, placed = await pictures.place(given, prompt, model)
    assert (found, placed.tokens) == (whole, short)
    assert [part["url"].partition(",")[2] for part in placed.parts] == given


async def test_vllm_gets_the_format_of_the_file_and_its_digest(pictures: Pictures, model: str) -> None:
    _, placed = await pictures.place([f"data:image/png;base64,{text(JPEG)}"], [IMAGE], model)
    url = f"data:image/jpeg;base64,{text(JPEG)}"
    assert placed.parts == [{"type": "image_url", "uuid": digest_of(JPEG), "url": url}]


@pytest.mark.parametrize(
    ("given", "prompt", "message"),
    [
        ([text(PNG)], [1, 2], "has 1 images, and the prompt has places for 0"),
        ([text(PNG)], [IMAGE, 1, IMAGE], "has 1 images, and the prompt has places for 2"),
        ([text(PNG)], [IMAGE] * 3, "the prompt has 3 tokens for image 1, and the image takes 4"),
        (["http://127.0.0.1:1/a.png"], [IMAGE], "image 1 is not base64 of a PNG or JPEG file: this server opens no"),
        (["file:///etc/passwd"], [IMAGE], "image 1 is not base64"),
        (["/etc/passwd"], [IMAGE], "image 1 is"),
        (["data:image/gif;base64,R0lGOD"], [IMAGE], "image 1 is not base64"),
        ([text(file(8, 8, "gif"))], [IMAGE], "image 1 is neither a PNG nor a JPEG file"),
        ([text(PNG), text(PNG[: len(PNG) // 2])], [IMAGE, 1, IMAGE], "image 2 is not a complete and valid PNG file"),
        ([text(file(1, 300))], [IMAGE], "image 1 is 1 x 300 pixels"),
    ],
)
async def test_other_pictures_are_refused(
    pictures: Pictures, model: str, given: list[str], prompt: list[int], message: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        await pictures.place(given, prompt, model)
    assert str(refused.value).startswith("image_data: ")
    assert message in str(refused.value)


async def test_a_model_of_text_takes_no_pictures(pictures: Pictures, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(BadRequest, match="image_data: the model takes no images: it is a model of text"):
        await pictures.place([text(PNG)], [IMAGE], str(tmp_path))


def test_the_request_has_sampling_parameters_apart() -> None:
    body = {"model": "m", "prompt": [1, 9, 9], "max_tokens": 3, "seed": 1, "priority": -2, "session_id": "s"}
    made = generate_body(body | {"stream": True, "return_token_ids": True}, PlacedPictures([1, 9], [{"type": "x"}]))
    assert made.pop("sampling_params") == {"max_tokens": 3, "seed": 1}
    assert made == {
        "model": "m",
        "priority": -2,
        "stream": True,
        "return_token_ids": True,
        "token_ids": [1, 9],
        "content_parts": [{"type": "x"}],
        "output_mode": "text",
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "vLLM made a prompt of None tokens, and 2 were counted"),
        ({"choices": [], "prompt_token_ids": [1]}, "vLLM made a prompt of 1 tokens"),
        (
            {
                "choices": [{"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}}],
                "prompt_token_ids": [1, 9],
            },
            "other logprobs than tokens",
        ),
        ({"choices": ["x"], "prompt_token_ids": [1, 9]}, "other logprobs than tokens"),
    ],
)
def test_an_answer_to_another_prompt_or_without_its_logprobs_is_an_error(answer: object, message: str) -> None:
    with pytest.raises(VllmBroke, match=message):
        as_completion(answer, [1, 9], chunk=False)
