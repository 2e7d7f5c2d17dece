"""What can somebody do who can write to the folder of a saved model?"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError, SparkDLError, StorageError
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.serialization.load import load_module, load_signature
from sparkdl.serialization.trust import Trust, is_users_own, trusting
from sparkdl.storage.atomic_folder import write_folder
from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.storage import Data, LocalStorage
from sparkdl.storage.tensor_tree import snapshot
from tests.describable import make_net

ROOT = Path(__file__).parents[2]


def hostile(root: Path, recipe: dict[str, Any], extra: Any = None) -> Path:
    """A folder that is whole, with sums, and was never a model."""
    index = {"version": 2, "recipe": recipe, "extra": extra or describe({})}
    files: dict[str, Data] = {"weights.safetensors": encode(snapshot({}))}
    write_folder(LocalStorage(root), "model", "module.json", index, files)
    return root


def called(path: str, *args: Any, **keywords: Any) -> dict[str, Any]:
    return {"partial": {"import": path}, "args": list(args), "keywords": keywords}


def marked(marker: Path) -> list[tuple[str, dict[str, Any]]]:
    """Factories that touch a file, each in its own way."""
    code = f"open({str(marker)!r}, 'w')"
    return [
        (path, called(path, *args, **keywords))
        for path, args, keywords in [
            ("os:system", [f"touch {marker}"], {}),
            ("posix:system", [f"touch {marker}"], {}),
            ("builtins:eval", [code], {}),
            ("builtins:exec", [code], {}),
            ("builtins:open", [str(marker), "w"], {}),
            ("subprocess:Popen", [["touch", str(marker)]], {}),
            ("subprocess:check_call", [["touch", str(marker)]], {}),
            ("torch:os.system", [f"touch {marker}"], {}),
            ("torch.nn.functional:torch.os.system", [f"touch {marker}"], {}),
            ("tests.describable:torch.os.system", [f"touch {marker}"], {}),
            ("tests.describable:nn.Module.__init__.__globals__", [], {}),
            ("torch:load", ["weights"], {"weights_only": False}),
            ("torch.hub:load", ["somebody/something", "anything"], {}),
            ("torch:from_file", [str(marker)], {"shared": True, "size": 1}),
            ("numpy:load", ["weights"], {"allow_pickle": True}),
            ("pickle:loads", ["weights"], {}),
            ("functools:reduce", [], {}),
            ("pathlib:Path.touch", [], {}),
            ("torch.nn.modules.module:register_module_forward_hook", [], {}),
            ("sparkdl.runtime.public_names:import_object", ["os:system"], {}),
            ("sparkdl.storage.storage:LocalStorage", [str(marker)], {}),
            ("sparkdl.data.spool.local_disk:open_private", [str(marker), os.O_CREAT], {}),
            # torchvision's WeightsEnum.get_state_dict loads what its object names, by pickle.
            ("sparkdl.models.resnet:CifarResNet.forward", ["anything"], {}),
            ("torchmetrics.metric:Metric.__setstate__", ["anything", {}], {}),
            ("sparkdl.serialization.load:load_module", ["elsewhere"], {"trusted": "os"}),
        ]
    ]


@pytest.mark.parametrize("number", range(len(marked(Path("x")))))
def test_a_folder_cannot_call_what_nobody_trusts(tmp_path: Path, number: int) -> None:
    marker = tmp_path / "marker"
    path, factory = marked(marker)[number]
    place = hostile(tmp_path / "m", {"factory": factory})
    with pytest.raises(SparkDLError, match=r"trusted=|no class and no function"):
        load_module(place)
    assert not marker.exists(), path


def test_a_folder_cannot_lend_itself_trust(tmp_path: Path) -> None:
    """What sparkdl puts in place of transforms says itself whom to trust."""
    marker = tmp_path / "marker"
    text = json.dumps({"import": "os:system"})
    named = {
        "dataclass": "sparkdl.serialization.load:NamedTransform",
        "fields": {"text": text, "trusted": {"tuple": ["os", "posix"]}},
    }
    factory = {"partial": named, "args": [f"touch {marker}"], "keywords": {}}
    with pytest.raises(ConfigError, match="trusted="):
        load_module(hostile(tmp_path / "m", {"factory": factory}))
    image = {
        "dataclass": "sparkdl:Tensor",
        "fields": {"column": "x", "transform": named, "shape": None},
    }
    column = {"name": "x", "role": "feature", "dtype": "float32", "shape": [3]}
    described = describe({"columns": [{**column, "specification": image}], "num_classes": None})
    signature = load_signature(hostile(tmp_path / "n", {"factory": factory}, described))
    with pytest.raises(ConfigError, match="trusted="):
        signature.inputs[0].kind.transform(f"touch {marker}")
    assert not marker.exists()


def test_a_class_that_is_no_module_is_refused(tmp_path: Path) -> None:
    def module(path: str, **args: Any) -> dict[str, Any]:
        return {"module": {"module": path, "args": args, "frozen": []}}

    for recipe in (
        module("tests.describable:Options"),
        module("torch.optim.sgd:SGD", params=[]),
        module("tests.describable:make_net"),
        {"factory": called("tests.describable:Options")},
    ):
        with pytest.raises(SparkDLError, match=r"not a class of modules|must make an nn.Module"):
            load_module(hostile(tmp_path / "m", recipe))


def test_dataclasses_of_other_packages_are_refused() -> None:
    with pytest.raises(ConfigError, match="trusted=\\['urllib'\\]"):
        restore({"dataclass": "urllib.request:Request", "fields": {"url": "http://a"}})


@pytest.mark.slow
def test_nothing_is_imported_that_is_not_trusted(tmp_path: Path) -> None:
    """Neither of Python's own nor of installed packages; and nothing at all for a signature."""
    column = {"name": "x", "role": "feature", "dtype": "float32", "shape": (3,)}
    extra = describe({"columns": [column], "num_classes": None})
    place = hostile(tmp_path / "m", {"factory": called("antigravity:fly")}, extra)
    other = hostile(tmp_path / "n", {"factory": called("sklearn.datasets:load_iris")})
    program = f"""
        import sys
        import sparkdl
        assert [c.name for c in sparkdl.load_signature({str(place)!r}).inputs] == ["x"]
        for place, module in (({str(place)!r}, "antigravity"), ({str(other)!r}, "sklearn")):
            try:
                sparkdl.load_module(place)
            except sparkdl.ConfigError as error:
                assert "trusted=" in str(error), error
            assert module not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=ROOT)


def test_columns_of_a_signature_are_checked_too(tmp_path: Path) -> None:
    extra = {"dict": [["columns", [called("os:system", "true")]], ["num_classes", None]]}
    hostile(tmp_path, {"factory": called("tests.describable:make_net")}, extra)
    with pytest.raises(ConfigError, match="os:system"):
        load_signature(tmp_path)


def test_what_the_user_names_is_trusted_and_no_more(tmp_path: Path) -> None:
    factory = called("collections:OrderedDict")
    place = hostile(tmp_path, {"factory": factory})
    with pytest.raises(ConfigError, match=r"trusted=\['collections'\]"):
        load_module(place)
    with pytest.raises(ConfigError, match="must make an"):
        load_module(place, trusted=["collections"])
    with pytest.raises(ConfigError, match="trusted="):
        load_module(place, trusted="collectionsandmore")
    for wrong in ("", "*", "os:system", "a b"):
        with pytest.raises(ConfigError, match="names of packages"):
            trusting(wrong)


def test_ordinary_names_need_no_trust() -> None:
    import torchmetrics

    from sparkdl import AllReduce, Image, warmup
    from sparkdl.models import MLP

    for value in (
        functools.partial(make_net, 3),
        MLP,
        functools.partial(nn.Linear, 3, 4),
        nn.functional.relu,
        nn.functional.gelu,
        torch.optim.Adam,
        torch.optim.lr_scheduler.StepLR,
        functools.partial(torchmetrics.Accuracy, task="binary"),
        warmup,
        AllReduce(),
        Image("photo"),
        {"a": (1, torch.float32)},
    ):
        described = json.loads(json.dumps(describe(value)))
        assert describe(restore(described)) == described


def test_code_of_the_users_own_is_what_no_package_manager_has_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, is_own in (("mine", True), ("site-packages/theirs", False)):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / f"code_{folder.name}.py").write_text("raise SystemExit\n")
        monkeypatch.syspath_prepend(folder)
        assert is_users_own(f"code_{folder.name}") is is_own
    for name in ("os", "builtins", "numpy", "torch.nn", "sparkdl.models", "not_there", "_io"):
        assert not is_users_own(name), name
    assert is_users_own("tests.describable")


def test_only_the_saving_program_trusts_everything() -> None:
    assert Trust(in_all=True).import_object("os:getcwd") is not None
    with pytest.raises(ConfigError):
        Trust().import_object("os:getcwd")


def test_a_description_of_another_thing_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="describes no module"):
        load_module(hostile(tmp_path, {"module": 3}))
