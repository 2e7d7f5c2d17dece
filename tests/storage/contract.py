"""What must every storage do? The tests that all of them pass, in one class to inherit from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkdl.errors import StorageError
from sparkdl.storage.storage import Folder, Storage, check_writable


class StorageContract:
    """Needs a fixture ``storage``: a new, empty one for each test."""

    def test_files_come_back_and_are_replaced(self, storage: Storage) -> None:
        storage.write("a/b", b"one")
        assert storage.read("a/b") == b"one"
        storage.write("a/b", [memoryview(b"tw"), bytearray(b"o"), b""])
        assert storage.read("a/b") == b"two"
        storage.write("empty", b"")
        assert storage.read("empty") == b""

    def test_list_gives_the_names_directly_under_a_folder(self, storage: Storage) -> None:
        assert storage.list("") == [] and storage.list("absent") == []
        for name in ("a/b", "a/c/d", "e"):
            storage.write(name, b"x")
        assert storage.list("") == ["a", "e"]
        assert storage.list("a") == ["b", "c"]

    def test_remove_takes_files_folders_and_nothing(self, storage: Storage) -> None:
        for name in ("a/b", "a/c/d", "ab"):
            storage.write(name, b"x")
        storage.remove("a/b")
        assert not storage.exists("a/b") and storage.exists("a/c")
        storage.remove("a")
        storage.remove("absent")
        assert storage.list("") == ["ab"] and not storage.exists("a")

    def test_reading_nothing_is_an_error_that_names_it(self, storage: Storage) -> None:
        with pytest.raises(StorageError, match=r"cannot read .*absent"):
            storage.read("absent")

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
    def test_no_path_leads_out(self, storage: Storage, path: str) -> None:
        for act in (storage.read, storage.list, storage.remove, storage.exists):
            with pytest.raises(StorageError, match="leads out"):
                act(path)
        with pytest.raises(StorageError, match="leads out"):
            storage.write(path, b"")

    def test_a_writable_storage_passes_and_keeps_nothing(self, storage: Storage) -> None:
        check_writable(storage)
        assert storage.list("") == []

    def test_half_a_file_is_none(self, storage: Storage) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("the rest is lost")

        with pytest.raises((RuntimeError, StorageError), match="the rest is lost"):
            storage.write("a/b", pieces())
        assert not storage.exists("a/b") and storage.list("a") == []


class FolderContract(StorageContract):
    """Needs a fixture ``storage`` that can move files."""

    def test_files_are_moved_over_what_is_there(self, storage: Folder) -> None:
        storage.write("a/b", b"new")
        storage.write("c/d", b"old")
        storage.move("a/b", "c/d")
        assert storage.read("c/d") == b"new"
        assert not storage.exists("a/b")
        storage.move("c/d", "new/deep/e")
        assert storage.read("new/deep/e") == b"new"
        with pytest.raises(StorageError, match="absent"):
            storage.move("absent", "new/deep/e")
        assert storage.read("new/deep/e") == b"new"

    def test_the_size_of_a_file(self, storage: Folder) -> None:
        storage.write("a/b", b"0123456789")
        assert storage.size("a/b") == 10
        storage.write("a/b", b"")
        assert storage.size("a/b") == 0
        with pytest.raises(StorageError, match="absent"):
            storage.size("absent")

    def test_a_part_of_a_file(self, storage: Folder) -> None:
        storage.write("a/b", b"0123456789")
        assert bytes(storage.part("a/b", 2, 5)) == b"234"
        assert bytes(storage.part("a/b", 0, 10)) == b"0123456789"
        assert bytes(storage.part("a/b", 10, 10)) == b""
        pages = bytes(range(256)) * 100
        storage.write("pages", pages)
        assert bytes(storage.part("pages", 5001, 20_001)) == pages[5001:20_001]
        with pytest.raises(StorageError, match="ends too early"):
            storage.part("a/b", 2, 13)
        with pytest.raises(StorageError, match="absent"):
            storage.part("absent", 0, 1)
