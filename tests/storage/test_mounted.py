"""Is a folder of a storage a storage, and a storage a folder of another?"""

from __future__ import annotations

import pytest

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
