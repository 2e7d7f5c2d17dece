from __future__ import annotations

import threading
import time

import pytest

from sparkdl.cli.doctor.finding import bounded, checked, ok, wrong
from sparkdl.errors import ClusterError


def test_a_line_has_state_subject_and_text() -> None:
    assert wrong("Java", "is not there").line() == "  wrong    Java           is not there"


def test_a_check_is_ok_or_its_own_error() -> None:
    def fails() -> str:
        raise ClusterError("too small; take more")

    assert checked("slots", lambda: None, "2") == ok("slots", "2")
    assert checked("slots", fails, "2") == wrong("slots", "too small; take more")


def test_an_error_that_is_not_ours_is_not_taken_for_a_finding() -> None:
    def fails() -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        checked("slots", fails, "2")


def test_an_action_in_time_gives_its_value_or_its_error() -> None:
    def fails() -> int:
        raise OSError("no route")

    assert bounded(lambda: 3, 10, "three") == 3
    with pytest.raises(OSError, match="no route"):
        bounded(fails, 10, "three")


def test_an_action_that_hangs_is_left_alone() -> None:
    end = threading.Event()
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"no answer within 0\.1 s: the cluster"):
        bounded(end.wait, 0.1, "the cluster")
    assert time.monotonic() - began < 5
    end.set()
