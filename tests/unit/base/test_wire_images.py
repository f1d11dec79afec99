"""Images in bodies: their files are taken out, their base64 text is read in pieces."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

import numpy as np
import pytest
from tinker.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

from skyrl.base.pictures.picture import MAX_PICTURES, PlacedPicture, digest_of
from skyrl.base.pictures.places import KnownPicture, place
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.wire import decoding
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.decoding import decode_base64
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import (
    ImagePart,
    SampleRequest,
    decode_sample_request,
    may_have_images,
    take_out,
    text_and_images,
)
from skyrl.base.wire.training import decode_forward_backward
from tests.unit.base.test_wire_training import as_json, sdk_body
from tests.unit.picture_files import png

PNG = png(32, 32)
JPEG = b"\xff\xd8\xff" + b"j" * 40
PAD = 99
SIGHT = VisionConfig("qwen3_vl", PAD, patch=16, merge=2, min_pixels=32 * 32, max_pixels=128 * 128)
KNOWN = {digest_of(PNG): KnownPicture("png", 64, 96)}
"""Six tokens."""


def located(data: bytes) -> str:
    return f"sha256:{digest_of(data)}"


def image(data: bytes = PNG, **more: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png"} | more


def sample_body(*chunks: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": {"chunks": list(chunks)}, "sampling_params": {"max_tokens": 4}}).encode()


def part(before: int, **more: Any) -> ImagePart:
    return ImagePart(
        **({"name": "prompt.chunks[1]", "before": before, "location": located(PNG), "format": "png"} | more)
    )


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


# Files are taken out of bodies.


def test_a_file_is_taken_out_once_and_named_in_each_of_its_chunks() -> None:
    body = sample_body({"tokens": [1, 2]}, image(), {"tokens": [3]}, image(JPEG, format="jpeg"), image())
    taken = take_out(body, "json")
    assert taken.files == {digest_of(PNG): PNG, digest_of(JPEG): JPEG}
    assert taken.names == {
        digest_of(PNG): ["prompt.chunks[1]", "prompt.chunks[4]"],
        digest_of(JPEG): ["prompt.chunks[3]"],
    }
    assert base64.b64encode(PNG) not in taken.body
    assert json.loads(taken.body)["sampling_params"] == {"max_tokens": 4}


def test_a_body_without_files_is_read_as_before_and_taking_out_again_changes_nothing() -> None:
    once = take_out(sample_body({"tokens": [1, 2]}, image(expected_tokens=6), {"tokens": [3]}), "json")
    again = take_out(once.body, "json")
    assert (again.body, again.files, again.names) == (once.body, {}, once.names)
    tokens, images = text_and_images(decode_sample_request(once.body, 1000).prompt)
    assert tokens == [1, 2, 3]
    assert images == [part(2, expected_tokens=6)]


def test_the_same_request_gives_the_same_body_so_that_a_repeat_is_known() -> None:
    body = sdk_body([Datum(ModelInput(chunks=[ImageChunk(data=PNG, format="png")]), {})])
    assert take_out(body, "proto").body == take_out(body, "proto").body


@pytest.mark.parametrize("body_format", ["json", "proto"])
def test_a_training_body_keeps_its_inputs_and_names_its_images(body_format: str) -> None:
    weights = {"data": [1.0] * 9, "dtype": "float32", "shape": [9]}
    chunks = [{"tokens": [1, 2]}, image(expected_tokens=6), {"tokens": [3]}]
    body = as_json({"model_input": {"chunks": chunks}, "loss_fn_inputs": {"weights": weights}})
    if body_format == "proto":
        found = [EncodedTextChunk(tokens=[1, 2]), ImageChunk(data=PNG, format="png", expected_tokens=6)]
        model_input = ModelInput(chunks=[*found, EncodedTextChunk(tokens=[3])])
        inputs: Any = {"weights": np.ones(9, np.float32)}
        body = sdk_body([Datum(model_input, inputs)])
    taken = take_out(body, body_format)
    assert taken.files == {digest_of(PNG): PNG}
    decoded = decode_forward_backward(taken.body, body_format, forward_only=False)
    assert decoded.tokens[0].tolist() == [1, 2, 3]
    assert decoded.images == [[part(2, name="data[0].model_input.chunks[1]", expected_tokens=6)]]
    assert decoded.loss_inputs[0]["weights"].tolist() == [1.0] * 9


def test_only_a_body_with_a_file_or_a_pointer_is_looked_through() -> None:
    tokens = json.dumps({"model_input": {"chunks": [{"tokens": [1]}]}, "data": [0.5]}).encode()
    assert not may_have_images(tokens, "json")
    assert not may_have_images(sdk_body([Datum(ModelInput.from_ints([1, 2]), {})]), "proto")
    for escaped in (json.dumps, lambda value: json.dumps(value).replace("/", "\\/")):
        assert may_have_images(escaped(image()).encode(), "json")
        assert may_have_images(escaped(image(JPEG)).encode(), "json")
        assert may_have_images(escaped({"location": located(PNG)}).encode(), "json")
    for other in (r'{"locat\u0069on": "sha256:0"}', r'{"data": "/9j\/4AA"}', r'{"data": "\u002f9j/4AA"}'):
        assert may_have_images(other.encode(), "json"), "other ways to write the same JSON"
    pointer = pb.Chunk(image=pb.ImageChunk(location=located(PNG)))
    body = pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[pointer])]).SerializeToString()
    assert may_have_images(body, "proto")
    assert may_have_images(sdk_body([Datum(ModelInput(chunks=[ImageChunk(data=JPEG, format="jpeg")]), {})]), "proto")


def test_data_that_is_no_base64_is_refused_by_the_name_of_its_chunk() -> None:
    with pytest.raises(RequestError, match=r"^prompt\.chunks\[1\]\.data: is not base64"):
        take_out(sample_body({"tokens": [1]}, image() | {"data": "%%%"}), "json")


def test_bodies_of_other_shapes_are_left_to_the_decoder() -> None:
    for wrong in (
        [],
        {"prompt": 1},
        {"prompt": {"chunks": 3}},
        {"forward_input": {"data": [7]}},
        {"prompt": {"chunks": [4]}},
    ):
        assert json.loads(take_out(json.dumps(wrong).encode(), "json").body) == wrong


def test_dmel_chunks_are_refused_by_their_name() -> None:
    request = decode_sample_request(sample_body({"tokens": [1]}, {"type": "dmel", "dmel": "AAAA"}), None)
    with pytest.raises(RequestError, match=r"^prompt\.chunks\[1\]: is neither text nor an image"):
        text_and_images(request.prompt)
    body = pb.ForwardBackwardRequest(
        model_id="m", data=[pb.Datum(model_input=[pb.Chunk(dmel=pb.DmelChunk(dmel=b"x"))])]
    )
    with pytest.raises(RequestError, match=r"^data\[0\]\.model_input\.chunks\[0\]: is neither"):
        decode_forward_backward(body.SerializeToString(), "proto", forward_only=False)


# Pictures take their places.


def test_each_picture_takes_its_tokens_where_its_chunk_was() -> None:
    tokens, pictures = place(ids(1, 2, 3), [part(0), part(2), part(2), part(3)], KNOWN, SIGHT)
    pads = [PAD] * 6
    assert tokens.tolist() == [*pads, 1, 2, *pads, *pads, 3, *pads]
    assert [picture.start for picture in pictures] == [0, 8, 14, 21]
    assert pictures[0] == PlacedPicture(0, 6, digest_of(PNG), "png")
    assert all((tokens[picture.start : picture.stop] == PAD).all() for picture in pictures)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "expected tokens": (
        {"expected_tokens": 7},
        r"^prompt\.chunks\[1\]\.expected_tokens: is 7, and this image of 64 x 96 pixels has 6 tokens",
    ),
    "format": ({"format": "jpeg"}, r"^prompt\.chunks\[1\]\.format: is 'jpeg', and the file is 'png'"),
    "size": ({"override": (32, 32)}, r"^prompt\.chunks\[1\]\.override_dimensions: is \(32, 32\)"),
    "address": ({"location": "https://a/b.png"}, r"^prompt\.chunks\[1\]\.location: 'https://a/b.png' is no image that"),
    "path": ({"location": "/etc/passwd"}, r"'/etc/passwd' is no image that this server stores"),
    "short digest": ({"location": "sha256:ab"}, "is no image that this server stores"),
    "unknown": ({"location": "sha256:" + "0" * 64}, r"^prompt\.chunks\[1\]: is not stored on this server any more"),
    "inline": ({"location": ""}, r"^prompt\.chunks\[1\]: is neither a PNG nor a JPEG file"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_chunk_is_refused_by_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        place(ids(1, 2), [part(1, **given)], KNOWN, SIGHT)


def test_the_size_in_the_file_may_be_given_again() -> None:
    assert len(place(ids(1), [part(1, override=(64, 96), expected_tokens=6)], KNOWN, SIGHT)[1]) == 1


def test_a_file_that_is_no_picture_is_refused_with_its_reason() -> None:
    known = {digest_of(PNG): KnownPicture("png", error="is not a complete PNG file")}
    with pytest.raises(RequestError, match=r"^prompt\.chunks\[1\]: is not a complete PNG file$"):
        place(ids(1), [part(1)], known, SIGHT)


def test_too_many_pictures_are_refused_with_the_first_one_too_many() -> None:
    parts = [part(1, name=f"prompt.chunks[{index}]") for index in range(MAX_PICTURES + 1)]
    assert len(place(ids(1), parts[:-1], KNOWN, SIGHT)[1]) == MAX_PICTURES
    with pytest.raises(RequestError, match=rf"^prompt\.chunks\[{MAX_PICTURES}\]: holds 65 images"):
        place(ids(1), parts, KNOWN, SIGHT)


def test_the_token_of_images_may_not_be_in_the_text_beside_an_image() -> None:
    with pytest.raises(RequestError, match=r"^prompt: token id 99 stands for images"):
        place(ids(1, PAD), [part(1)], KNOWN, SIGHT)


def test_a_request_without_images_may_hold_any_token() -> None:
    request: SampleRequest = decode_sample_request(sample_body({"tokens": [1, PAD]}), 1000)
    assert text_and_images(request.prompt) == ([1, PAD], [])


@pytest.mark.parametrize("piece", [4, 8, 2**20])
def test_pieces_are_the_same_as_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIECE", piece)
    for length in range(60):
        data = Random(length).randbytes(length)
        assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("piece", [4, 2**20])
def test_what_python_refuses_is_refused_in_pieces_too(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIECE", piece)
    whole, rng, refused = base64.b64encode(bytes(range(40))).decode(), Random(1), 0
    for _ in range(3000):
        at = rng.randrange(len(whole))
        text = whole[:at] + rng.choice(("", "=", "==", "\n", "-", "é", "A")) + whole[at + rng.choice((0, 1)) :]
        try:
            expected: bytes | None = base64.b64decode(text, validate=True)
        except ValueError:
            expected, refused = None, refused + 1
        if expected is None:
            with pytest.raises(ValueError, match="."):
                decode_base64(text)
        else:
            assert decode_base64(text) == expected
    assert 500 < refused < 2900
