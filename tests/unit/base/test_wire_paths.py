"""tinker:// paths, and the ids that both the server and the SDK compute."""

from __future__ import annotations

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.paths import (
    TinkerPath,
    check_name,
    model_id_of,
    parse_path,
    sampling_session_id_of,
)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tinker://s1:train:0/weights/ck-1", TinkerPath("s1:train:0", "weights", "ck-1")),
        ("tinker://s1:train:0/sampler_weights/0001", TinkerPath("s1:train:0", "sampler_weights", "0001")),
        ("tinker://s1:train:0/external_weights/download", TinkerPath("s1:train:0", "external_weights", "download")),
        ("tinker://m/weights/" + "a" * 255, TinkerPath("m", "weights", "a" * 255)),
        ("tinker://m/weights/.hidden_Name-2.0", TinkerPath("m", "weights", ".hidden_Name-2.0")),
    ],
)
def test_a_path_is_parsed_and_written_back(text: str, path: TinkerPath) -> None:
    assert parse_path(text) == path
    assert str(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "ck-1",
        "/etc/passwd",
        "http://m/weights/a",
        "tinker:/m/weights/a",
        "tinker://m/weights",
        "tinker://m/weights/",
        "tinker:///weights/a",
        "tinker://m/optimizer/a",
        "tinker://m/weights/a/b",
        "tinker://m/weights/..",
        "tinker://m/weights/.",
        "tinker://m/weights/a b",
        "tinker://m/weights/a\n",
        "tinker://m/weights/a%2fb",
        "tinker://m/weights/é",
        "tinker://m/weights/" + "a" * 256,
        "tinker://../weights/../../a",
    ],
)
def test_an_invalid_path_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_path(text, "model_path")
    assert caught.value.field == "model_path"
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "a\0b", "a" * 256, "-\n"])
def test_an_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_name(name)
    assert caught.value.field == "path"


def test_ids_equal_those_that_the_sdk_computes() -> None:
    assert model_id_of("s1", 3) == "s1:train:3"
    assert sampling_session_id_of("s1", 4) == "s1:sample:4"
