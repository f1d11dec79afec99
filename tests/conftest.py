"""What tests of several folders share: an S3-compatible server on loopback."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: what goes into `checkpoint_store` and `checkpoint_store_options`."""

    url: str
    options: dict[str, str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a running server that speaks S3 and keeps what it is given in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would log every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def new_bucket(s3_server: str) -> Callable[[], Bucket]:
    """Makes buckets; `url` has a prefix in its bucket."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

    def make() -> Bucket:
        name = f"bucket-{secrets.token_hex(4)}"
        client = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=name)
        client.close()
        return Bucket(f"s3://{name}/some/prefix", {"endpoint": s3_server, "region": "us-east-1", **keys})

    return make
