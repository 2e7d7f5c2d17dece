from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.recorded.recipe import NotRecorded
from sparkdl.serialization.recorded.recording import recorded
from sparkdl.serialization.travel.packed_module import pack
from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import save_module


def make(classes: int = 2, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"body": body, "head": nn.Linear(4, classes)})


def equal(one: nn.Module, other: nn.Module, *names: str) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[n], theirs[n]) for n in ours if n.startswith(names or ("",)))


class Fitted:
    """Looks like a fitted model, without Spark."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def as_folder(path: Path, module: nn.Module) -> str:
    save_module(module, None, LocalStorage(path), "model", example_inputs=None, extra={})
    return str(path)


def as_file(path: Path, module: nn.Module) -> str:
    save_file(module.state_dict(), path / "weights.safetensors")
    return str(path / "weights.safetensors")


def as_index(path: Path, module: nn.Module) -> str:
    """As Hugging Face writes large models."""
    state, shards = module.state_dict(), {}
    for number, names in enumerate((list(state)[::2], list(state)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in names}, path / file)
        shards |= dict.fromkeys(names, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return str(index)


def in_memory(folder: Path) -> str:
    """The same files in a storage of fsspec's."""
    files = fsspec.filesystem("memory")
    files.put(str(folder), f"/{folder.name}", recursive=True)
    return f"memory://{folder.name}"


KINDS = ["module", "model", "state", "folder", "url", "file", "file url", "index", "index folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_whatever_holds_them(tmp_path: Path, kind: str) -> None:
    source, target = make(seed=1), make(seed=2)
    source["body"][1].running_mean.fill_(5.0)
    given: Any = {
        "module": lambda: source,
        "model": lambda: Fitted(source),
        "state": source.state_dict,
        "folder": lambda: Path(as_folder(tmp_path, source)),
        "url": lambda: f"file://{as_folder(tmp_path, source)}",
        "index": lambda: as_index(tmp_path, source),
        "index folder": lambda: Path(as_index(tmp_path, source)).parent,
        "file": lambda: as_file(tmp_path, source),
        "file url": lambda: f"file://{as_file(tmp_path, source)}",
    }[kind]()
    assert not equal(source, target)
    load_initial_weights(target, InitialWeights(source=given))
    assert equal(source, target)
    with torch.no_grad():
        for value in target.state_dict().values():
            value.fill_(0)
    assert not equal(source, target, "head")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_file_has_tied_weights_once(tmp_path: Path, is_recorded: bool) -> None:
    def make_tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"inputs": nn.Linear(3, 3), "outputs": nn.Linear(3, 3)})
        module["outputs"].weight = module["inputs"].weight
        return module

    source = make_tied()
    save_model(source, str(tmp_path / "weights.safetensors"))
    initial = InitialWeights(source=tmp_path / "weights.safetensors")
    target = make_tied()
    if is_recorded:
        target, weights = recorded(make_tied)
        load_initial_weights(target, initial, weights=weights)
        weights.fill(target)
    else:
        load_initial_weights(target, initial)
    assert equal(source, target)
    untied = nn.ModuleDict({"inputs": nn.Linear(3, 3), "outputs": nn.Linear(3, 3)})
    with pytest.raises(ConfigError, match=r"\(s\): (in|out)puts.weight is not in the weights"):
        load_initial_weights(untied, initial)


def test_an_index_that_is_none(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "{}", '{"weight_map": {"a": "../b.safetensors"}}'):
        index.write_text(text)
        with pytest.raises(StorageError, match="no index of safetensors files"):
            load_initial_weights(make(), InitialWeights(source=index))


@pytest.mark.parametrize("kind", ["state", "folder", "file", "index", "url"])
def test_recorded_weights_come_from_a_source_tensor_by_tensor(tmp_path: Path, kind: str) -> None:
    source = make(seed=1)
    source["body"][1].running_mean.fill_(5.0)
    given: Any = {
        "state": source.state_dict,
        "folder": lambda: as_folder(tmp_path, source),
        "file": lambda: as_file(tmp_path, source),
        "index": lambda: as_index(tmp_path, source),
        "url": lambda: in_memory(Path(as_index(tmp_path, source)).parent),
    }[kind]()
    for dtype in (torch.float32, torch.float64):
        target, weights = recorded(lambda dtype=dtype: make(seed=2).to(dtype))
        initial = InitialWeights(source=given, skip=("head.bias",))
        load_initial_weights(target, initial, weights=weights)
        alone = make(seed=2).to(dtype)
        load_initial_weights(alone, initial)
        for name, value in target.state_dict().items():
            made = weights.of(value)
            assert torch.equal(value if made is None else made, alone.state_dict()[name]), name
        packed = pack(target, weights)
        assert packed.pieces is not None
        weights.fill(target)
        assert equal(target, alone)


def test_a_file_is_refused_for_recorded_weights_as_for_others(tmp_path: Path) -> None:
    source = make(classes=5)
    target, weights = recorded(make)
    path = as_file(tmp_path, source)
    for initial in (InitialWeights(source=path), InitialWeights(source=source)):
        with pytest.raises(ConfigError, match=r"head.bias is float32 \(2,\) in .*, float32 \(5"):
            load_initial_weights(target, initial, weights=weights)
    (tmp_path / "half.safetensors").write_bytes(Path(path).read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"half.safetensors ends too early"):
        initial = InitialWeights(source=tmp_path / "half.safetensors")
        load_initial_weights(target, initial, weights=weights)
    target.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(NotRecorded, match="a way of its own to load weights"):
        load_initial_weights(target, InitialWeights(source=make()), weights=weights)


def test_relative_paths_are_meant_as_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert InitialWeights(source="a/b").source == f"{tmp_path}/a/b"
    assert InitialWeights(source="s3://a/b").source == "s3://a/b"


def test_floating_weights_take_the_modules_dtype() -> None:
    source, target = make(seed=1), make(seed=2).double()
    load_initial_weights(target, InitialWeights(source=source))
    assert target["head"].weight.dtype == torch.float64
    assert torch.equal(target["head"].weight.float(), source["head"].weight)


def test_all_differences_are_told_before_anything_changes() -> None:
    source, target = make(classes=5, seed=1), make(seed=2)
    source["extra"] = nn.Linear(1, 1)
    del source["body"][1]
    before = make(seed=2)
    with pytest.raises(ConfigError) as caught:
        load_initial_weights(target, InitialWeights(source=source))
    for words in (
        "differ from the module in 9 place(s): ", "body.1.bias is not in the weights", "; ...",
        "InitialWeights(source=..., skip=",
    ):  # fmt: skip
        assert words in str(caught.value)
    assert equal(before, target)


def test_shapes_and_kinds_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"head.bias is float32 \(2,\) in .*, float32 \(5"):
        load_initial_weights(make(), InitialWeights(source=make(classes=5)))
    state = make().state_dict()
    state["head.bias"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"head.bias is float32 \(2,\) .*int64 \(2,\)"):
        load_initial_weights(make(), InitialWeights(source=state))


def test_what_is_skipped_may_be_missing_left_over_or_of_another_shape() -> None:
    source, target = make(classes=5, seed=1), make(seed=2)
    source["old"], target["new"] = nn.Linear(1, 1), nn.Linear(2, 2)
    head = target["head"].weight.detach().clone()
    load_initial_weights(target, InitialWeights(source=source, skip=["head", "old.*", "new"]))
    assert equal(make(seed=1), target, "body")
    assert torch.equal(target["head"].weight, head)


def test_a_skip_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"initialWeights\.skip: .* 'haed'; did you mean 'head'"):
        load_initial_weights(make(), InitialWeights(source=make(), skip=("haed",)))


def test_lazy_layers_take_the_shape_of_the_weights() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    source = nn.Sequential(nn.Linear(3, 4))
    load_initial_weights(lazy, InitialWeights(source=source))
    assert torch.equal(lazy[0].weight, source[0].weight)


def test_tied_weights_stay_tied() -> None:
    def tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
        module["head"].weight = module["embed"].weight
        return module

    source, target = tied(), tied()
    load_initial_weights(target, InitialWeights(source=source))
    assert target["head"].weight is target["embed"].weight
    assert equal(source, target)


def tie(module: nn.ModuleDict) -> nn.ModuleDict:
    module["head"].weight = module["embed"].weight
    return module


def untied() -> nn.ModuleDict:
    return nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})


def test_different_weights_for_tied_ones_are_refused() -> None:
    source, target = untied(), tie(untied())
    with pytest.raises(
        ConfigError, match=r"head\.weight and embed\.weight are one tensor in the m"
    ):
        load_initial_weights(target, InitialWeights(source=source))
    load_initial_weights(target, InitialWeights(source=source, skip=("head.weight",)))
    assert torch.equal(target["head"].weight, source["embed"].weight)
    with torch.no_grad():
        source["head"].weight.copy_(source["embed"].weight).mul_(1)
    load_initial_weights(target, InitialWeights(source=source))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([1.0, 1e6]), torch.float16),
        (torch.tensor([1e300, -1e300], dtype=torch.float64), torch.float32),
        (torch.tensor([1, 300]), torch.uint8),
        (torch.tensor([1, -1]), torch.uint8),
    ],
)
def test_numbers_that_do_not_fit_are_refused(value: torch.Tensor, dtype: torch.dtype) -> None:
    target = nn.Module()
    target.register_buffer("b", torch.zeros(2, dtype=dtype))
    kind = f"{dtype}".removeprefix("torch.")
    with pytest.raises(ConfigError, match=rf"b has numbers in the weights that {kind} \(2,\) of t"):
        load_initial_weights(target, InitialWeights(source={"b": value}))
    assert torch.equal(target.get_buffer("b"), torch.zeros(2, dtype=dtype))
    fitting = torch.ones_like(value)
    if value.is_floating_point():
        fitting[1] = torch.inf  # was no number of that dtype's either
    load_initial_weights(target, InitialWeights(source={"b": fitting}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("webhdfs://me:secret@host/weights.pt", r"//\*\*\*@host/weights\.pt is a pickle"),
        ("hdfs:///weights.pt", r"weights\.pt is a pickle.*weights_only=True"),
        ("file:///a/model.ckpt", "is a pickle"),
        ("weights.pt", "there is no file weights.pt"),
        (42, "must be a fitted model, a module, a state dict, or the path.*received int"),
        ({1: 2}, "received dict"),
        (functools.partial(make), "received partial"),
    ],
)
def test_other_sources_are_refused_when_they_are_given(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InitialWeights(source=source)


def test_skip_must_be_patterns() -> None:
    with pytest.raises(ConfigError, match="skip must be a tuple of patterns; received 'head'"):
        InitialWeights(source={}, skip="head")  # type: ignore[arg-type]


def test_damage_and_absence_are_storage_errors(tmp_path: Path) -> None:
    file = Path(as_file(tmp_path, make()))
    file.write_bytes(file.read_bytes()[:-1])
    folder = Path(as_folder(tmp_path / "m", make()))
    weights = folder / "model" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    for source, message in (
        (file, "is no whole file of safetensors"),
        (folder, "weights.safetensors is damaged"),
        (tmp_path / "absent.safetensors", "cannot read"),
        (tmp_path / "absent", "holds no saved module"),
    ):
        with pytest.raises(StorageError, match=message):
            load_initial_weights(make(), InitialWeights(source=source))


def pickled(path: Path, value: Any) -> str:
    torch.save(value, path / "weights.pt")
    return str(path / "weights.pt")


class Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_files_of_torch_save_are_read_on_request_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = make(seed=1), make(seed=2)
    path = pickled(tmp_path, source.state_dict())
    with pytest.raises(ConfigError, match=r"pickle, which can run code; .*weights_only"):
        InitialWeights(source=path)
    load_initial_weights(target, InitialWeights(source=path, weights_only=True))
    assert equal(source, target)

    path = pickled(tmp_path, {"epoch": 3, "model": source.state_dict()})
    target = make(seed=2)
    inside = functools.partial(InitialWeights, source=f"file://{path}", weights_only=True)
    load_initial_weights(target, inside(key="model"))
    assert equal(source, target)
    for key in ("", "epoch", "modl"):
        with pytest.raises(ConfigError, match=r"has the entries epoch, model, and .* no state"):
            load_initial_weights(target, inside(key=key))

    pickled(tmp_path, {**source.state_dict(), "x": Malicious()})
    with pytest.raises(ConfigError, match="refused by torch's restricted unpickler"):
        load_initial_weights(target, inside())
    assert not Path("touched").exists()
    Path(path).write_bytes(Path(path).read_bytes()[:500])
    with pytest.raises((ConfigError, StorageError), match=r"weights\.pt is "):
        load_initial_weights(target, inside())


def test_weights_only_is_for_files_of_torch_save() -> None:
    for options in ({"source": make(), "weights_only": True}, {"source": "/a/model", "key": "x"}):
        with pytest.raises(ConfigError, match=r"for the path of a file of torch\.save"):
            InitialWeights(**options)  # type: ignore[arg-type]


def test_foreign_names_become_the_modules() -> None:
    source, target = make(seed=1), make(seed=2)
    foreign = {
        f"module.{name}".replace("module.body", "module.trunk.block"): value
        for name, value in source.state_dict().items()
    }
    names = {"module": "", "module.trunk.block.*": "body.*"}
    load_initial_weights(target, InitialWeights(source=foreign, names=names))
    assert equal(source, target)
    body = {name.removeprefix("body."): v for name, v in source.state_dict().items()}
    target = make(seed=2)
    inner = {name: value for name, value in body.items() if not name.startswith("head")}
    load_initial_weights(target, InitialWeights(source=inner, names={"": "body"}, skip=("head",)))
    assert equal(source, target, "body")


def test_names_that_do_not_match_are_told_with_those_that_are_alike() -> None:
    foreign = {name.replace("body", "trunk"): v for name, v in make().state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_initial_weights(make(), InitialWeights(source=foreign))
    assert "alike are trunk.0.bias for body.0.bias, trunk.0.weight for body.0" in str(caught.value)
    wrong: list[tuple[dict[str, str], str]] = [
        ({"trunc": "body"}, "nothing in the weights is called 'trunc'; did you mean 'trunk'"),
        ({"xyz": "body"}, "nothing in the weights is called 'xyz'; there are trunk.0.weight, "),
        ({"trunk.*": "body.0"}, "'trunk.\\*' and 'body.0' must have as many"),
        ({"*a*a*a*a.x": "****"}, "more than 3 \\* between two dots"),
        ({"trunk.0": "body", "trunk.1": "body"}, "both trunk.0.weight and trunk.1.weight would"),
    ]
    for names, message in wrong:
        with pytest.raises(ConfigError, match=message):
            load_initial_weights(make(), InitialWeights(source=foreign, names=names))
    with pytest.raises(ConfigError, match="names must be a dict"):
        InitialWeights(source=foreign, names=["trunk"])  # type: ignore[arg-type]
