"""One form for each worker's URL."""

from __future__ import annotations

import pytest

from skyrl.router.worker import normalise_url


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://Host", "http://host"),
        (" HTTP://host:80// ", "http://host"),
        ("https://host:443/", "https://host"),
        ("http://host:443/", "http://host:443"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://host/Base/", "http://host/Base"),
    ],
)
def test_forms_of_one_url(url: str, normal: str) -> None:
    assert normalise_url(url) == normal
    assert normalise_url(normal) == normal
