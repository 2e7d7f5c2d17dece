"""Is a folder of a storage a storage, and a storage a folder of another?"""

from __future__ import annotations

import pytest

from sparkdl.errors import StorageError
from sparkdl.storage.mounted import Mounted, Subfolder
from sparkdl.storage.storage import Storage
from tests.storage.contract import StorageContract
from tests.storage.memory import MemoryStorage


@pytest.fixture(params=["mounted", "beside", "below"])
def storage(request: pytest.FixtureRequest) -> Storage:
    mounted = Mounted(MemoryStorage())
    mounted.mount("there", MemoryStorage())
    makers = {
        "mounted": lambda: Subfolder(mounted, "there", "there"),
        "beside": lambda: mounted,
        "below": lambda: Subfolder(MemoryStorage(), "a/b", "below"),
    }
    return makers[request.param]()


class TestContract(StorageContract):
    """Both directions."""


def test_what_is_mounted_lies_elsewhere() -> None:
    base, other = MemoryStorage(), MemoryStorage()
    both = Mounted(base)
    both.mount("there", other)
    both.write("there/a", b"1")
    both.write("here/there", b"2")
    assert other.list("") == ["a"] and base.list("") == ["here"]
    assert str(both) == "memory" and str(Subfolder(both, "there", "hdfs://x")) == "hdfs://x"


def test_what_is_mounted_is_not_removed_as_a_whole() -> None:
    other = MemoryStorage()
    both = Mounted(MemoryStorage())
    both.mount("there", other)
    other.write("run/a", b"1")
    with pytest.raises(StorageError, match="another storage is mounted"):
        both.remove("./there")
    both.remove("there/run")
    assert other.list("") == []
