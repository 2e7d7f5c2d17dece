"""What can somebody do who can write to the folder of a saved model?"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import py4j.protocol
import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError, SparkDLError, StorageError
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.serialization.load import column_from_json, load_module, load_signature
from sparkdl.serialization.saved_module import give_unlisted
from sparkdl.serialization.trust import Trust, is_installed, is_users_own, trusting
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
            ("_testcapi:run_in_subinterp", [code], {}),
            ("test.support.script_helper:assert_python_ok", ["-c", code], {}),
            ("py4j.java_gateway:launch_gateway", [], {"java_path": "/bin/sh"}),
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
            ("sparkdl.sync.asynchronous.slice_link:SliceServer", [], {}),
            (
                "torchmetrics.functional.multimodal.clip_score:_get_clip_model_and_processor",
                ["clip/model/jinaai"],
                {},
            ),
            ("torchmetrics.multimodal:CLIPScore", [], {"model_name_or_path": "somebody/jinaai"}),
            ("torchmetrics.functional.classification.accuracy:_accuracy_reduce", [], {}),
            ("torch.nn.functional:_get_softmax_dim", [], {}),
            ("torch.nn.functional:embedding_bag", [], {}),
            (
                "torch.nn:ParameterDict",
                [{"dict": [["__class__", {"import": "torch.nn:LSTM"}]]}],
                {},
            ),
            ("torch._C._nn:_parse_to", [], {}),
            ("torch._C._nn:max_unpool2d", [], {}),
            ("sparkdl.models.gan:_network", [], {}),
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


def test_only_the_transform_of_a_column_is_imported_when_it_is_called(program_folder: Path) -> None:
    """Inputs of the user's own kind may have other fields with functions."""
    code = """
        import dataclasses
        from sparkdl.inputs import Tensor
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Mine(Tensor):
            encode: object = None
    """
    (program_folder / "mine.py").write_text(textwrap.dedent(code))
    named = {
        "dataclass": "sparkdl.serialization.load:NamedTransform",
        "fields": {"text": json.dumps({"import": "os:system"}), "trusted": {"tuple": ["posix"]}},
    }
    column = {"name": "x", "role": "feature", "dtype": "float32", "shape": [3]}
    for transform in (None, {"import": "math:sqrt"}):
        fields = {"column": "x", "shape": None, "transform": transform, "encode": named}
        own = {**column, "specification": {"dataclass": "mine:Mine", "fields": fields}}
        extra = describe({"columns": [own], "num_classes": None})
        with pytest.raises(ConfigError, match="trusted="):
            load_signature(hostile(program_folder / "m", {"factory": called("math:sqrt")}, extra))
        fields["encode"] = {"import": "math:floor"}
        extra = describe({"columns": [own], "num_classes": None})
        hostile(program_folder / "m", {"factory": called("math:sqrt")}, extra)
        found: Any = load_signature(program_folder / "m").inputs[0].specification
        assert found.encode(2.5) == 2
        assert transform is None or found.transform(9.0) == 3.0


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


CHILD = '",0) or getattr(__import__("os"),"system")("touch MARKER") or getattr(self,"'
RELU = {"module": "torch.nn.modules.activation:ReLU", "args": {"inplace": False}, "frozen": []}
CONTAINERS = "torch.nn.modules.container"


@pytest.mark.parametrize(
    "recipe",
    [
        {"module": {"module": f"{CONTAINERS}:Sequential", "args": [[CHILD, RELU]], "frozen": []}},
        {"module": {"module": f"{CONTAINERS}:ModuleDict", "args": [["a b", RELU]], "frozen": []}},
        {"module": {"module": f"{CONTAINERS}:Sequential", "args": [["", RELU]], "frozen": []}},
        {"factory": called(f"{CONTAINERS}:ModuleDict", {"dict": [[CHILD, RELU]]})},
    ],
)  # fmt: skip
def test_names_of_parts_cannot_become_source(tmp_path: Path, recipe: dict[str, Any]) -> None:
    """torch.fx writes the names of children into Python source."""
    with pytest.raises(ConfigError, match="identifiers or numbers"):
        load_module(hostile(tmp_path, recipe))


@pytest.mark.parametrize("key", ["forward'", "_modules", "_buffers", "_forward_hooks", "training"])
def test_attributes_that_are_torchs_own_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"identifiers or numbers|torch's own"):
        give_unlisted(nn.ReLU(), {"buffers": {}, "attributes": [("", key, {CHILD: 1})]})
    with pytest.raises(ConfigError, match="identifiers or numbers"):
        give_unlisted(nn.ReLU(), {"buffers": {CHILD: torch.ones(1)}, "attributes": []})


@pytest.mark.parametrize("file", ["module.json", "weights.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_an_error(tmp_path: Path, file: str) -> None:
    place = hostile(tmp_path, {"factory": {"import": "tests.describable:make_net"}})
    (place / "model" / file).unlink()
    os.mkfifo(place / "model" / file)
    with pytest.raises(StorageError, match="a pipe, a socket or a device"):
        load_module(place)


def test_files_that_are_larger_than_they_should_be_are_not_read(tmp_path: Path) -> None:
    """A file of a terabyte without content takes no space on the disk."""
    place = hostile(tmp_path, {"factory": {"import": "tests.describable:make_net"}})
    for file, words in (("weights.safetensors", "expected"), ("module.json", "are no index")):
        os.truncate(place / "model" / file, 1 << 40)
        with pytest.raises(StorageError, match=words):
            load_module(place)


@pytest.mark.parametrize("extra", [{"dict": [["columns"]]}, {"dict": 3}, {}, [], "x"])
def test_odd_values_of_an_index_are_errors_of_ours(tmp_path: Path, extra: Any) -> None:
    recipe = {"factory": called("tests.describable:make_net", "x")}
    index = {"version": 2, "recipe": recipe, "extra": extra}
    files: dict[str, Data] = {"weights.safetensors": encode(snapshot({}))}
    write_folder(LocalStorage(tmp_path), "model", "module.json", index, files)
    with pytest.raises(StorageError, match="does not say what the model takes"):
        load_signature(tmp_path)
    with pytest.raises(ConfigError, match="a module that cannot be made"):
        load_module(tmp_path)


@pytest.mark.parametrize(
    ("kind", "attribute", "number"),
    [
        *(
            ("LSTM", name, 7)
            for name in ("hidden_size", "num_layers", "bidirectional", "proj_size")
        ),
        *(("GRU", name, 7) for name in ("hidden_size", "num_layers")),
        *(("RNN", name, 10**9) for name in ("input_size", "num_layers")),
        *(("MultiheadAttention", "num_heads", number) for number in (0, 3, 2.0)),
        ("MultiheadAttention", "head_dim", 0),
    ],
)
def test_sizes_that_a_layer_lacks_are_refused(
    tmp_path: Path, kind: str, attribute: str, number: float
) -> None:
    """Kernels read memory behind the weights, or divide by 0, and the process ended."""
    layer = getattr(nn, kind)(8, 4)
    index = {"version": 2, "recipe": {"factory": called(f"torch.nn:{kind}", 8, 4)}, "extra": {}}
    for key, value in (("dropout", 0.25), (attribute, number)):
        unlisted = {"buffers": {}, "attributes": [("", key, value)]}
        files: dict[str, Data] = {
            "weights.safetensors": encode(snapshot(dict(layer.state_dict()))),
            "unlisted.safetensors": encode(snapshot(unlisted)),
        }
        write_folder(LocalStorage(tmp_path), "model", "module.json", index, files)
        if key == "dropout":
            assert load_module(tmp_path).dropout == value
    with pytest.raises(ConfigError, match=r"sizes that its weights lack|cannot be made"):
        load_module(tmp_path)


@pytest.mark.parametrize("key", ["weight_ih_l0", "seen", "inner", "inner.x"])
def test_what_a_module_has_registered_is_not_set_besides(key: str) -> None:
    """An attribute of that name would hide a weight, whose size a kernel believes."""
    gru = nn.GRU(3, 4)
    gru.register_buffer("seen", torch.zeros(1))
    gru.inner = nn.ReLU()
    with pytest.raises(ConfigError, match="which the module has registered"):
        give_unlisted(gru, {"buffers": {}, "attributes": [("", key, torch.zeros(1, 3))]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("dtype", value) for value in (None, 3, "", "nn", "float33", [])),
        *(("shape", value) for value in (None, 3, [-1], [True], [2.0], ["x"], [[1]])),
        *(("longest", value) for value in (None, -1, "5", {"a": 1})),
        *(("cast", value) for value in (True, [], "int8", "float64")),
    ],
)
def test_columns_that_no_model_has_are_errors_of_ours(key: str, value: Any) -> None:
    usual = {"name": "x", "role": "feature", "dtype": "float32", "shape": [3]}
    assert column_from_json({**usual, "cast": "bfloat16"}).cast == "bfloat16"
    with pytest.raises(StorageError, match="which no column does"):
        column_from_json({**usual, key: value})


def test_descriptions_that_are_nested_too_deeply_are_an_error() -> None:
    for wrap in (
        lambda inner: [inner],
        lambda inner: {"tuple": [inner]},
        lambda inner: {"x": inner},
    ):
        deep: Any = None
        for _ in range(3000):
            deep = wrap(deep)
        with pytest.raises(ConfigError, match="nested too deeply"):
            restore([deep])


def test_tensors_without_bytes_show_no_memory() -> None:
    for shape in ([4096], [], [2, 3]):
        with pytest.raises(ConfigError, match="cannot make"):
            restore({"tensor": "", "dtype": "float32", "shape": shape})
    empty = restore({"tensor": "", "dtype": "float32", "shape": [3, 0]})
    assert empty.shape == (3, 0) and empty.dtype == torch.float32


@pytest.fixture
def program_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder on ``sys.path`` in which a program lies."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("files", "path"),
    [
        (["digits/model/evil.py"], "digits.model.evil"),
        (["digits/evil.py"], "digits.evil"),
        (["digits/__init__.py"], "digits"),
        (["digits/__init__.py", "digits/model/__init__.py"], "digits.model"),
        (["digits/model/evil/__init__.py"], "digits.model.evil"),
        (["evil/deep/code.py"], "evil.deep.code"),
        (["other/__init__.py", "other/code.py", "other/module.json"], "other.code"),
        (["mine/__init__.py", "mine/linked.py"], "mine.linked"),
    ],
)
def test_code_where_models_are_written_is_not_the_users_own(
    program_folder: Path, files: list[str], path: str
) -> None:
    """A folder next to the program is a package for Python, also without ``__init__.py``."""
    marker = program_folder / "marker"
    for name in files:
        (program_folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = "{}" if name.endswith("json") else f"open({str(marker)!r}, 'w')\ndef go(): pass\n"
        (program_folder / name).write_text(text)
    if path == "mine.linked":
        (program_folder / "mine/__init__.py").write_text("")
        (program_folder / "digits/model").mkdir(parents=True)
        (program_folder / "mine/linked.py").rename(program_folder / "digits/model/linked.py")
        (program_folder / "mine/linked.py").symlink_to(program_folder / "digits/model/linked.py")
    extra = {"dict": [["columns", [{"import": f"{path}:go"}]], ["num_classes", None]]}
    place = hostile(program_folder / "digits", {"factory": {"import": f"{path}:go"}}, extra)
    for load in (load_module, load_signature):
        with pytest.raises(ConfigError, match="trusted="):
            load(place)
    assert not marker.exists()


def test_a_package_without_init_is_trusted_by_name(program_folder: Path) -> None:
    (program_folder / "parts").mkdir()
    code = "from torch import nn\ndef make(): return nn.ReLU()\n"
    (program_folder / "parts/net.py").write_text(code)
    place = hostile(program_folder / "m", {"factory": {"import": "parts.net:make"}})
    assert isinstance(load_module(place, trusted="parts"), nn.ReLU)


def test_parts_of_a_pipeline_are_read_from_the_whole_of_it(tmp_path: Path) -> None:
    outer = str(tmp_path / "pipe")
    for inner in (
        "stages/0_x",
        "stages/12_Pipeline_1/stages/3_y",
        "bestModel",
        "bestModel/stages/1_a/",
    ):
        assert Trust().reading(f"{outer}/{inner}").place == outer
        assert Trust().reading(f"file://{outer}/{inner}").place == outer
    for place in (outer, f"{outer}/stages"):
        assert Trust().reading(place).place == place
    assert Trust().reading("s3://models/digits").place is None


THEIRS = """
    import importlib, pathlib
    from torch import nn
    class Base(nn.Module):
        @classmethod
        def from_pretrained(cls, path): pathlib.Path(path).touch()
    def __getattr__(name): return importlib.import_module(f"theirs.{name}")
"""
MINE = """
    import theirs
    class Net(theirs.Base):
        @classmethod
        def small(cls): return cls()
    net = Net()
"""


def test_what_a_class_of_the_users_own_inherits_is_not_the_users_own(program_folder: Path) -> None:
    """Libraries' base classes read pickled weights, or download them, in class methods."""
    marker, theirs = program_folder / "marker", program_folder / "site-packages/theirs"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text(textwrap.dedent(THEIRS))
    (theirs / "late.py").write_text(f"open({str(marker)!r}, 'w')\ndef go(): pass\n")
    (program_folder / "mine.py").write_text(textwrap.dedent(MINE))
    sys.path.insert(0, str(theirs.parent))  # undone with the fixture's own entry
    assert type(restore(called("mine:Net.small"))()).__name__ == "Net"
    for factory in (
        called("mine:Net.from_pretrained", str(marker)),
        called("mine:theirs.Base.from_pretrained", str(marker)),
        called("mine:theirs.late.go"),
        called("theirs:late.go"),
        called("mine:net.small"),
    ):
        with pytest.raises(ConfigError, match=r"trusted=\['theirs'\]|no class and no function"):
            load_module(hostile(program_folder / "m", {"factory": factory}))
    assert not marker.exists()
    restore(called("mine:Net.from_pretrained", str(marker)), trusting("theirs"))()
    assert marker.exists()


@pytest.fixture
def fake_torchvision(program_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the form of torchvision's: a function that loads weights by name, in site-packages."""
    folder = program_folder / "site-packages/torchvision/models"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    code = """
        from torch import nn
        def resnet18(*, weights=None, **options):
            assert not weights, "downloaded"
            return nn.Linear(options.get("num_classes", 3), 2)
        def _resnet(): return nn.ReLU()
    """
    (folder / "resnet.py").write_text(textwrap.dedent(code))
    (folder / "_api.py").write_text("def get_model(name, **options): raise SystemExit\n")
    monkeypatch.syspath_prepend(folder.parents[1])
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("fake_torchvision")
def test_networks_of_torchvision_are_made_without_their_downloads() -> None:
    resnet = "torchvision.models.resnet:resnet18"
    for description in (called(resnet), called(resnet, num_classes=5, weights=None)):
        assert isinstance(restore(description)(), nn.Linear)
    inner = {"partial": called(resnet), "args": [], "keywords": {"weights": "DEFAULT"}}
    for description in (
        called(resnet, weights="DEFAULT"),
        called(resnet, weights_backbone="DEFAULT"),
        called(resnet, pretrained=True),
        called(resnet, True),
        inner,
        called("torchvision.models.resnet:_resnet"),
        called("torchvision.models._api:get_model", "resnet18", weights="DEFAULT"),
    ):
        with pytest.raises(ConfigError, match=r"trusted=\['torchvision'\]"):
            restore(description)
    assert restore(called(resnet, weights="DEFAULT"), trusting("torchvision")).keywords


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


def test_names_cannot_speak_to_a_terminal(tmp_path: Path) -> None:
    name = "torch.nn:Linear\x1b]0;title\x07"
    with pytest.raises(ConfigError, match=r"Linear\\x1b\]0;title\\x07") as caught:
        load_module(hostile(tmp_path, {"factory": {"import": name}}))
    assert str(caught.value).isprintable()


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
        nn.functional.cross_entropy,
        nn.functional.softplus,
        nn.init.xavier_uniform_,
        nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "0": nn.ReLU()}),
        torch.optim.Adafactor,
        torchmetrics.MeanMetric,
        torchmetrics.functional.classification.binary_accuracy,
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
    of_python = ("os", "builtins", "_io", "test.__main__", "_testcapi", "idlelib.run")
    for name in (*of_python, "numpy", "torch.nn", "sparkdl.models", "py4j.protocol", "not_there"):
        assert not is_users_own(name), name
    spark = tmp_path / "spark/python/lib/py4j-src.zip"  # as spark-submit has it
    monkeypatch.setattr(py4j.protocol, "__file__", str(spark / "py4j/protocol.py"))
    assert not is_users_own("py4j.protocol") and is_installed("py4j.protocol")
    of_c = [type.__dict__["__module__"], None, "", "_cython_3_1_4"]  # as some classes of C have it
    assert all(map(is_installed, of_c))
    made = types.ModuleType("numpy.made_in_c")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert not is_users_own(made.__name__) and is_installed(made.__name__)
    assert is_users_own("tests.describable")


def test_only_the_saving_program_trusts_everything() -> None:
    assert Trust(in_all=True).import_object("os:getcwd") is not None
    with pytest.raises(ConfigError):
        Trust().import_object("os:getcwd")


def test_a_description_of_another_thing_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="describes no module"):
        load_module(hostile(tmp_path, {"module": 3}))
