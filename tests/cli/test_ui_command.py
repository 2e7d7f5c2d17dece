from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sparkdl.cli.main import main


def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkdl", "ui", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None, line
        with urllib.request.urlopen(found[0], timeout=10) as answer:
            assert b"Runs" in answer.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")


def test_a_taken_port_is_an_error_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_a_directory_of_no_known_kind_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "nosuchscheme://x/y"]) == 1
    assert "nosuchscheme" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path / "nothere")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no folder {tmp_path}/nothere; name the one")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--help"]) == 0
    assert "sparkdl ui runs" in capsys.readouterr().out
