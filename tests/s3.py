"""An S3 server on the loopback, as a process of its own, and how clients find it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_ports

BUCKET = "tests"
_START_SECONDS = 60.0


(_PORT,) = free_ports(1)
ENVIRONMENT = {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{_PORT}",
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-log-shows",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}
"""To be set before the client's process starts any thread; nothing leaves this machine."""


@contextlib.contextmanager
def started_server(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """moto's server, with an empty bucket."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1",
               "-p", str(_PORT)]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _make_first_bucket(process, log)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


def make_bucket(name: str) -> None:
    """An empty bucket of the server that runs, where there is none of that name.

    Raises:
        OSError: the server does not answer.
    """
    request = urllib.request.Request(f"{ENVIRONMENT['AWS_ENDPOINT_URL']}/{name}", method="PUT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(request, timeout=5).close()


def _make_first_bucket(process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask until the server answers."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            make_bucket(BUCKET)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no S3 server: {log.read_text(encoding='utf-8')}") from error
            time.sleep(0.1)
        else:
            return
