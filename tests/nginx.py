"""Runs the nginx configurations of the pages, with TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pages import blocks_of

NEEDS_NGINX = pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl (Debian's packages)"
)

PROXY_PAGE = "docs/operating/proxy.md"

STOP_S = 10.0

CONFIGURATION = """
daemon off;
master_process off;
pid {here}/nginx.pid;
error_log stderr;
events {{ }}
http {{
    log_format answers "$status $request_uri";
    access_log {here}/access.log answers;
    client_body_temp_path {here};
    proxy_temp_path {here};
    fastcgi_temp_path {here};
    uwsgi_temp_path {here};
    scgi_temp_path {here};
    {servers}
}}
"""


def certificate(directory: Path) -> Path:
    """The certificate that `write_configuration` makes. Clients must trust it."""
    return directory / "localhost.pem"


def write_configuration(directory: Path, servers: str) -> list[str]:
    """Write a configuration with the `server` blocks of a page, and the certificate that they name, both for the name
    `localhost`. Return the command that runs nginx in the foreground."""

    def local(text: str) -> str:
        for there in ("/etc/ssl/certs", "/etc/ssl/private"):
            text = text.replace(there, str(directory))
        return text.replace("gpu.example.org", "localhost")

    [make] = [block.text for block in blocks_of(PROXY_PAGE) if "openssl req" in block.text]
    made = subprocess.run(["bash", "-c", local(make)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    servers = local(servers)
    file = directory / "nginx.conf"
    file.write_text(CONFIGURATION.format(here=directory, servers=servers))
    return ["nginx", "-e", "stderr", "-p", str(directory), "-c", str(file)]


@contextmanager
def running_nginx(directory: Path, servers: str) -> Iterator[Path]:
    """Run nginx with these `server` blocks; yields the file that holds its log."""
    command, log = write_configuration(directory, servers), directory / "nginx.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as nginx:
        try:
            yield log
        finally:
            nginx.terminate()
            nginx.wait(STOP_S)
