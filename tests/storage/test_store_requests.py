"""Whichever request to S3 fails, and however, checkpoints come out whole, or a warning says not."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import Popen
from typing import Any

import pyarrow.fs
import pytest
import torch

from sparkdl.comm.channel import Hub
from sparkdl.config import CheckpointConfig
from sparkdl.errors import StorageError
from sparkdl.storage import s3 as s3_client
from sparkdl.storage.checkpoint_format import (
    CheckpointInfo,
    Writer,
    folders,
    latest,
    load_rank,
    load_shared,
)
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.lease import Lease
from sparkdl.storage.mounted import Subfolder
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage, open_storage
from tests import s3
from tests.s3_proxy import NONE, Proxy, started_proxy

STEPS = 2
AT_A_TIME = 4
EVER = 10**6


@pytest.fixture(scope="module")
def proxy(s3_server: Popen[bytes]) -> Iterator[Proxy]:
    with started_proxy(s3.ENVIRONMENT["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def through_the_proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    yield
    proxy.fail("", NONE)


def opened(*pauses: float) -> Storage:
    """A folder of its own, as a worker opens it."""
    return Retried(open_storage(f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"), pauses)


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((4,), float(step)), "step": step}


def run(storage: Storage, *, attempt: int = 0, num_saves: int = STEPS) -> CheckpointInfo | None:
    """Go on from the newest checkpoint of the key, and write some more; returns what was found."""
    config = CheckpointConfig(keep=1, interval=1)
    with Lease(storage, "run", "a") as lease:
        found = latest(storage, "run")
        lease.begin(attempt, None if found is None else found.path)
        first = 0 if found is None else found.step
        with CheckpointManager(
            storage, config, rank=0, world_size=1, environment={}, signal=Hub(), pauses=(0.0, 0.0),
            writer=Writer(run_key="run", run_id="a", attempt=attempt),
        ) as manager:  # fmt: skip
            for step in range(first + 1, first + 1 + num_saves):
                manager.save(step, state(step), {"seed": step})
    return found


def check(storage: Storage, step: int) -> None:
    """The newest is whole, and has the bits of its step; reading compares the checksums."""
    found = latest(storage, "run")
    assert found is not None and found.step == step
    assert torch.equal(load_shared(found)["weights"], state(step)["weights"])
    assert load_rank(found, 0) == {"seed": step}


def num_requests(proxy: Proxy) -> int:
    """Of `run`."""
    storage = opened()
    proxy.fail("", NONE)
    run(storage)
    count, requests = proxy.count, proxy.requests
    check(storage, STEPS)
    assert count > 30
    proxy.requests = requests[:count]
    return count


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_request_that_fails_once_costs_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried at every request of a run that differs from later ones in more than its numbers.

    Some at a time, since clients mostly wait between tries.
    """
    num_requests(proxy)
    last = {re.sub(r"[0-9a-f]{32}|[0-9]+", "#", r): n for n, r in enumerate(proxy.requests, 1)}
    assert len(last) > 10
    numbers = iter(enumerate(sorted(last.values())))

    def some_runs(own: Proxy, url: str) -> None:
        for index, number in numbers:
            storage = Retried(Subfolder(places[own], str(number), url), (0.0, 0.0))
            own.fail(("503", "reset")[index % 2], range(number, number + 1))
            assert run(storage) is None
            assert own.count > number
            own.fail("", NONE)
            check(storage, STEPS)
            assert [folder.step for folder in folders(storage, "run")] == [STEPS], number
            assert storage.list("run") == ["a-0"], number  # no lease

    places: dict[Proxy, Storage] = {}
    url = f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"
    with ThreadPoolExecutor(AT_A_TIME) as pool, contextlib.ExitStack() as stack:
        for _ in range(AT_A_TIME):
            own = stack.enter_context(started_proxy(s3.ENVIRONMENT["AWS_ENDPOINT_URL"]))
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", own.url)
            places[own] = open_storage(url)
        list(pool.map(some_runs, places, [url] * AT_A_TIME))
    assert next(numbers, None) is None
    assert "there is no checkpoint" not in caplog.text


@pytest.mark.slow
def test_a_run_that_goes_on_finds_its_checkpoint_whichever_request_fails(proxy: Proxy) -> None:
    storage = opened(0.0, 0.0)
    run(storage)
    proxy.fail("", NONE)
    check(storage, STEPS)
    for number in range(1, proxy.count + 1):
        proxy.fail(("503", "reset")[number % 2], range(number, number + 1))
        check(storage, STEPS)


@pytest.mark.slow
def test_a_request_that_is_not_answered_is_made_again(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does it late all the same."""
    total = num_requests(proxy)
    monkeypatch.setattr(s3_client, "REQUEST_SECONDS", 0.5)
    for number in (total // 4, total * 3 // 4):
        storage = opened(0.0, 0.0)
        proxy.stall_seconds = 1.0
        proxy.fail("stall", range(number, number + 1))
        run(storage)
        time.sleep(0.6)  # what was late has come
        proxy.fail("", NONE)
        check(storage, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_outage_costs_checkpoints_and_the_next_run_goes_on(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a request on all fail, until the run has ended; so pyarrow need not try each again."""
    once = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1)
    client = partial(pyarrow.fs.S3FileSystem, retry_strategy=once)
    monkeypatch.setattr(pyarrow.fs, "S3FileSystem", client)
    total = num_requests(proxy)
    for number in (6, total * 2 // 3):
        storage = opened()
        caplog.clear()
        proxy.fail("503", range(number, EVER))
        with contextlib.suppress(StorageError):
            run(storage)
        proxy.fail("", NONE)
        found = latest(storage, "run")
        step = 0 if found is None else found.step
        if step < STEPS:
            missing = f"there is no checkpoint run/a-0/step-0000000{step + 1}"
            assert missing in caplog.text, (number, caplog.text)
        assert run(storage, attempt=1, num_saves=STEPS - step + 1) == found
        check(storage, STEPS + 1)
        assert [folder.step for folder in folders(storage, "run")] == [STEPS + 1], number
