"""SIGTERM and SIGHUP remove what a driver has on its disk, and still end it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl.spark.session.termination import removed_at_termination

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def nobody_listens_yet() -> Iterator[None]:
    """Tests that ran before in this process may: a search listens for the rest of a program."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


PROGRAM = """
import signal, sys, threading, time
from pathlib import Path
from sparkdl.spark.session import termination

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

def fit():
    with termination.removed_at_termination(sys.argv[2]):
        time.sleep(60)

with termination.removed_at_termination(sys.argv[1]):
    other = threading.Thread(target=fit, daemon=True)
    other.start()
    print("going", flush=True)
    time.sleep(60)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", SIGNALS)
def test_the_folders_of_all_fits_are_gone_and_the_signal_is_what_ended_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "weights").write_bytes(b"1")
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "going\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == -number
    assert said.startswith(f"{number.name} has ended this process") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_is_as_before_in_the_end_and_in_other_threads(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with removed_at_termination(str(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with removed_at_termination(str(tmp_path / "inner")):
            pass
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    seen = []

    def elsewhere() -> None:
        with removed_at_termination(str(tmp_path)):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert seen == [signal.SIG_DFL]


def test_a_program_that_handles_the_signal_itself_keeps_its_handler(tmp_path: Path) -> None:
    caught = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        with removed_at_termination(str(tmp_path)):
            signal.raise_signal(signal.SIGTERM)
            assert tmp_path.exists()  # it lets the run go on
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
