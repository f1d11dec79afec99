"""Inputs that fuzzing found once, and small bodies that ask for much memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.training import PROTOBUF
from tests.fuzz.inputs import NESTED
from tests.fuzz.target import Target

API, ENGINE = "skyrl.api.server", "skyrl.engine.main"
NOT_UTF8 = b'"\xff":1,"x":1'


def test_bad_bytes_in_fields_that_the_struct_skips_fail_the_command(target: Target) -> None:
    """Decoding into a struct skips unknown fields; reading such a field by name later gave a 500."""
    path = f'"path":"{target.ids["path"]}"'.encode()
    for wrong in (NOT_UTF8, b'"weights_access_token":"\xff"', b'"weights_access_token":1e400'):
        result = target.command("load_weights", target.numbered(path + b"," + wrong))
        assert result is not None
        assert "JSON" in result["error"], wrong
    deep = b'"weights_access_token":' + b"[" * NESTED + b"]" * NESTED
    assert target.command("load_weights", target.numbered(path + b"," + deep)) is None
    result = target.command("save_weights_for_sampler", target.numbered(NOT_UTF8 + b',"path":"odd"'))
    assert result is not None
    assert "path" in result


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 10**30])
def test_token_ids_beyond_64_bits_fail_with_category_user(target: Target, token: int) -> None:
    chunk = f'{{"model_input":{{"chunks":[{{"tokens":[{token}]}}]}},"loss_fn_inputs":{{}}}}'
    field = f'"forward_backward_input":{{"data":[{chunk}],"loss_fn":"cross_entropy"}}'
    result = target.command("forward_backward", target.numbered(field.encode()))
    assert result is not None
    assert result["error"].startswith("data[0].model_input: ")


def test_many_small_bytes_for_large_sparse_tensors_are_refused(target: Target) -> None:
    """Each tensor alone is allowed. Some hundreds of them in a body took all memory."""
    datum = pb.Datum()
    for index in range(200):
        tensor = datum.loss_fn_inputs[str(index)]
        tensor.dtype = pb.FLOAT32
        tensor.shape.extend([1, 2**26])
        tensor.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
    body = pb.ForwardBackwardRequest(data=[datum], loss_fn="cross_entropy").SerializeToString()
    before = target.peak_mib(ENGINE)
    result = target.command("forward_backward", target.numbered_proto(body), PROTOBUF)
    assert result is not None
    assert "cells together" in result["error"]
    assert target.peak_mib(ENGINE) - before < 1100


@pytest.mark.parametrize("size_in_frame", [True, False])
@pytest.mark.parametrize("route", ["forward_backward", "asample", "create_session"])
def test_zstd_bombs_at_the_same_time_take_bounded_memory(target: Target, route: str, size_in_frame: bool) -> None:
    """Five bodies of some kilobytes become 255 MiB each. They wait for memory as bodies of 255 MiB do."""
    text = b'{"x":"' + b" " * (255 * 2**20) + b'"}'
    bomb = zstandard.ZstdCompressor(write_content_size=size_in_frame).compress(text)
    del text
    assert len(bomb) < 50_000
    before = target.peak_mib(API)

    def send(_: int) -> int:
        headers = {"Content-Encoding": "zstd"}
        return target.send("POST", f"/api/v1/{route}", content=bomb, headers=headers).status_code

    with ThreadPoolExecutor(5) as pool:
        statuses = set(pool.map(send, range(5)))
    assert statuses == {400 if route == "forward_backward" else 413}
    assert target.peak_mib(API) - before < 700


def test_prompts_of_millions_of_tokens_are_refused_in_bounded_memory(target: Target) -> None:
    """Ten million tokens are read and refused. A hundred million tokens are refused by the size of the body."""
    before = target.peak_mib(API)
    for count, status, field in ((10**7, 400, "prompt"), (10**8, 413, None)):
        tokens = b"1," * count + b"1"
        body = b'{"sampling_session_id":"%s","prompt":{"chunks":[{"tokens":[%s]}]}}'
        content = zstandard.compress(body % (target.ids["sampler"].encode(), tokens))
        answer = target.send("POST", "/api/v1/asample", content=content, headers={"Content-Encoding": "zstd"})
        assert answer.status_code == status
        assert answer.json()["field"] == field
    assert target.peak_mib(API) - before < 500
