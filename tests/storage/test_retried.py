"""What may be repeated is tried again, unless the cause would stay."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from sparkdl.errors import CommunicationError, SparkDLError, StorageError
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Data, check_writable, failure
from tests.storage.contract import StorageContract
from tests.storage.memory import MemoryStorage


class TestContract(StorageContract):
    """It is a storage like any other."""

    @pytest.fixture
    def storage(self) -> Retried:
        return Retried(MemoryStorage(), (0.0,))


def caused_by(cause: Exception) -> StorageError:
    error = failure("ask", "there", cause)
    error.__cause__ = cause
    return error


class Failing(MemoryStorage):
    """Its first requests of each kind fail."""

    def __init__(self, error: SparkDLError, times: int) -> None:
        super().__init__()
        self._error = error
        self._left = dict.fromkeys(("write", "read", "list", "remove", "exists"), times)
        self.num_requests = 0

    def _fail(self, what: str) -> None:
        self.num_requests += 1
        self._left[what] -= 1
        if self._left[what] >= 0:
            raise self._error

    def write(self, path: str, data: Data) -> None:
        self._fail("write")
        super().write(path, data)

    def read(self, path: str) -> bytes:
        self._fail("read")
        return super().read(path)

    def remove(self, path: str) -> None:
        self._fail("remove")
        super().remove(path)


BUSY = caused_by(OSError("AWS Error SLOW_DOWN during PutObject"))


@pytest.mark.parametrize("error", [BUSY, CommunicationError("the way is lost")])
def test_what_may_pass_is_tried_again(error: SparkDLError) -> None:
    storage = Retried(Failing(error, 2), (0.0, 0.0))
    check_writable(storage)
    storage.write("a", b"1")
    assert storage.read("a") == b"1"
    assert storage.list("") == ["a"] and storage.exists("a")
    with pytest.raises(type(error)):
        Retried(Failing(error, 3), (0.0, 0.0)).write("a", b"1")


@pytest.mark.parametrize(
    "error",
    [
        caused_by(FileNotFoundError(errno.ENOENT, "absent")),
        caused_by(PermissionError("no errno")),
        caused_by(OSError(errno.ENOSPC, "full")),
        caused_by(OSError(errno.EROFS, "read-only")),
        StorageError("leads out of its storage"),
    ],
)
def test_what_would_fail_again_is_not(error: StorageError) -> None:
    failing = Failing(error, 1)
    with pytest.raises(StorageError) as raised:
        Retried(failing, (0.0, 0.0)).read("a")
    assert raised.value is error and failing.num_requests == 1


def test_pieces_that_are_gone_are_not_sent_again() -> None:
    make: Callable[[], Data] = lambda: iter([b"1", b"2"])  # noqa: E731
    with pytest.raises(StorageError):
        Retried(Failing(BUSY, 1), (0.0,)).write("a", make())
