from __future__ import annotations

import time

import pytest

from sparkdl.errors import ConfigError
from sparkdl.runtime.name_patterns import check_fit, fits, fits_any, renamed

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "head.weight", "scale"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder", 3),
        ("encoder.*", 3),
        ("encoder.0", 2),
        ("encoder.1", 0),
        ("encoder.?", 2),
        ("encoder.[0-3]", 2),
        ("encoder.[0-9]*", 3),
        ("*.weight", 3),
        ("*bias", 1),
        ("scale", 1),
        ("Scale", 0),
        ("weight", 0),
        ("*", 5),
        ("enc", 0),
        ("encoder.0.weight", 1),
        ("encoder.0.weigh", 0),
    ],
)
def test_a_pattern_means_names_and_what_layers_hold(pattern: str, expected: int) -> None:
    assert sum(fits(pattern, name) for name in NAMES) == expected


def test_any_of_several() -> None:
    assert fits_any(["head", "x"], "head.weight")
    assert not fits_any([], "head.weight")


def test_what_means_nothing_is_refused_with_a_hint() -> None:
    check_fit(["encoder", "scale"], NAMES, "frozenLayers")
    with pytest.raises(ConfigError, match=r"frozenLayers: .* 'encodr\.\*'; did you mean 'encoder"):
        check_fit(["encodr.*"], NAMES, "frozenLayers")
    with pytest.raises(
        ConfigError, match=r"fits 'zzz'; its layers are 'encoder\.0', 'encoder\.10', 'head'$"
    ):
        check_fit(["zzz"], NAMES, "frozenLayers")


def test_names_are_compared_in_little_time() -> None:
    """Each part by itself: all ways through all parts would be too many to try."""
    began = time.monotonic()
    name, pattern = ".".join(["a" * 30] * 10), ".".join(["*a*a*"] * 10)
    with pytest.raises(ConfigError, match="nothing in the weights is called"):
        renamed({f"{name}!.x": 1}, {f"{pattern}b": "*" * 30})
    assert time.monotonic() - began < 5
    found = renamed({"a1b.layer.2.weight": 1}, {"a*b.layer.*": "c*.d*"})
    assert found == {"c1.d2.weight": 1}
