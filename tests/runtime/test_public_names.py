from __future__ import annotations

from pathlib import Path

from torch import nn

import sparkdl
import sparkdl.models
from sparkdl.models.layers import as_floats
from sparkdl.runtime.public_names import import_object
from sparkdl.serialization.json_objects import describe, import_path, restore

FORMER_PATHS = Path(__file__).with_name("former_paths.txt").read_text(encoding="utf-8").split()


def test_what_is_public_is_named_by_its_public_name() -> None:
    for name in set(sparkdl.__all__) - {"__version__"}:
        assert import_path(getattr(sparkdl, name)) == f"sparkdl:{name}"
    assert import_path(sparkdl.models.ResNet20) == "sparkdl.models:ResNet20"
    assert import_path(sparkdl.TorchClassifier.load) == "sparkdl:TorchClassifier.load"


def test_what_is_not_public_is_named_by_its_module() -> None:
    assert import_path(as_floats) == "sparkdl.models.layers:as_floats"
    assert import_path(nn.Linear) == "torch.nn.modules.linear:Linear"


def test_descriptions_name_no_file_of_the_package() -> None:
    strategy = sparkdl.AllReduce(compression=sparkdl.PowerSGD(rank=3))
    assert describe(strategy)["dataclass"] == "sparkdl:AllReduce"
    assert "sparkdl." not in repr(describe(strategy))
    assert restore(describe(strategy)) == strategy


def test_paths_that_older_versions_wrote_are_read() -> None:
    for path in FORMER_PATHS:
        name = path.partition(":")[2]
        assert import_object(path) is getattr(sparkdl, name)
    assert import_object("sparkdl.demo:DigitsNet").__name__ == "DigitsNet"
