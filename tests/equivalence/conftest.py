"""Two ranks for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gang import Gang, started_gang


@pytest.fixture(scope="session")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    with started_gang(tmp_path_factory.mktemp("gang")) as gang:
        yield gang
