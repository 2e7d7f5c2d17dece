from __future__ import annotations

import pytest

pytest.importorskip("petastorm", reason="run by `make petastorm`, in its own environment")
