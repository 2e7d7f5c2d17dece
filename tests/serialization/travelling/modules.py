"""A program with modules of many kinds, which packs each, and notes what it computes.

It runs as ``python modules.py FILE``, so its classes are those of a main program. What it writes is
``{name: (packed, found, found of the driver's own copy)}``, and `study`, which finds that.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize, prune

from sparkdl.serialization.travel.packed_module import PackedModule, pack, travelled

MAKERS: dict[str, Any] = {}
WIDTHS = {"hidden": 5, "mixed": [1.5, (2, "three")]}
LOG: list[float] = []


def maker(function: Any) -> Any:
    """Note a function that makes a module."""
    MAKERS[function.__name__] = function
    return function


def digest(tensor: torch.Tensor) -> str:
    """What tells the values of two tensors apart."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return " ".join(map(digest, tensor.unbind()))
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_meta:
        return f"meta {tuple(tensor.shape)}"
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a module: parameters, buffers and attributes, by name."""
    found = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers(remove_duplicate=False))
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}:{key}"] = value
    return found


def structure(module: nn.Module) -> dict[str, Any]:
    """What must be the same before and after, apart from the values."""
    about: dict[str, Any] = {"mode": module.training}
    memories: dict[int, list[str]] = collections.defaultdict(list)
    objects: dict[int, list[str]] = collections.defaultdict(list)
    for name, tensor in tensors(module).items():
        objects[id(tensor)].append(name)
        is_usual = type(tensor) in (torch.Tensor, nn.Parameter)
        line = [
            "" if is_usual else type(tensor).__name__,
            str(tensor.dtype),
            tensor.requires_grad and tensor.is_leaf,
        ]
        if not nn.parameter.is_lazy(tensor):
            line += [tensor.is_leaf or "graph", str(tensor.layout), tensor.is_meta]
            if tensor.layout is torch.strided and not tensor.is_nested:
                line += [tuple(tensor.shape), tensor.stride()]
                if torch._C._has_storage(tensor) and not tensor.is_meta:
                    memories[tensor.untyped_storage()._cdata].append(name)
        line[3:4] = []  # a tensor of a graph arrives as a leaf
        line.append(sorted(k for k in getattr(tensor, "__dict__", {})))
        line.append(
            [
                len(getattr(tensor, k, None) or ())
                for k in ("_backward_hooks", "_post_accumulate_grad_hooks")
            ]
        )
        about[name] = line
    about["memories"] = sorted(memories.values())
    about["objects"] = sorted(objects.values())
    for name, part in module.named_modules():
        hooks = {
            key: len(value)
            for key, value in vars(part).items()
            if key in vars(nn.Module()) and "_hooks" in key and len(value)
        }
        is_special = isinstance(part, torch.jit.ScriptModule | torch._dynamo.OptimizedModule)
        bases = [base.__name__ for base in type(part).__mro__]
        own = sorted(vars(part).keys() - {"_compiled_call_impl", "slot", "kept"})
        about[f"layer {name}"] = [hooks] if is_special else [bases, hooks, own]
    return about


def study(module: nn.Module) -> dict[str, Any]:
    """The structure, what forward gives, and what three steps of SGD and of Adam make of it."""
    found: dict[str, Any] = {"structure": structure(module)}
    torch.manual_seed(3)
    x = getattr(module, "example", None)
    if x is None:
        x = torch.linspace(-1, 1, 24).reshape(6, 4).to(torch.get_default_dtype())
    for name, make in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = make(trained, lr=0.05) if trained else None
        losses = []
        for _ in range(3):
            if optimizer is not None:
                optimizer.zero_grad()
            output = module(x)
            output = output.values() if getattr(output, "is_nested", False) else output
            loss = (torch.view_as_real(output) if output.is_complex() else output).double()
            loss = loss.square().mean()
            losses.append(loss.item())
            if optimizer is not None:
                loss.backward()
                optimizer.step()
        found[name] = [losses, {n: digest(t) for n, t in tensors(module).items()}]
    return found


class Net(nn.Module):
    """Two layers, and whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@maker
def plain() -> nn.Module:
    return Net(numbers=WIDTHS)


# ---- parametrizations


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.scale


@maker
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 1))


@maker
def weight_norm_inside_own_class() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.first)
    return net


@maker
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))


@maker
def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 1))


@maker
def several_parametrizations() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", Scaled())
    parametrize.register_parametrization(layer, "bias", Scaled())
    return layer


class OwnParametrized(Net):
    __slots__ = ("kept",)


@maker
def parametrized_class_of_the_program() -> nn.Module:
    net = OwnParametrized()
    net.matrix = nn.Parameter(torch.eye(2))
    net.kept = 3
    parametrize.register_parametrization(net, "matrix", Symmetric())
    return net


@maker
def parametrized_lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(1, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(x[..., None])[0][:, -1]

    return Last()


# ---- tensors of a graph


@maker
def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))


@maker
def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))


@maker
def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


@maker
def pruned_in_several_ways() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    prune.ln_structured(net[0], "weight", 0.5, n=2, dim=0)
    prune.random_unstructured(net[0], "weight", 0.3)
    prune.global_unstructured(
        [(net[0], "bias"), (net[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.2
    )
    prune.custom_from_mask(net[2], "bias", torch.ones(1))
    return net


@maker
def used_before() -> nn.Module:
    class Keeps(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.tanh(self.first(x))
            self.all_seen = {"first": [self.seen]}
            return self.second(self.seen)

    net = Keeps()
    net(torch.ones(2, 4)).sum().backward()
    net.zero_grad(set_to_none=True)
    return net


# ---- memory


class Tied(nn.Module):
    def __init__(self, tie: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tie == "object":
            self.two.weight = self.one.weight
        elif tie == "data":
            self.two.weight.data = self.one.weight.data
        elif tie == "transposed":
            self.two.weight.data = self.one.weight.data.t()
        elif tie == "part":
            self.two.weight.data = self.one.weight.data[:2].repeat(1, 1)
            self.two.weight.data = self.one.weight.data[:4]
        elif tie == "layer":
            self.two = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


for _tie in ("object", "data", "transposed", "part", "layer"):
    MAKERS[f"tied_by_{_tie}"] = functools.partial(Tied, _tie)


@maker
def one_memory() -> nn.Module:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(40)
            self.weight = nn.Parameter(flat[3:15].view(3, 4))
            self.other = nn.Parameter(flat[20:36].view(4, 4).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x @ self.other, self.weight)

    return Flat()


class Buffers(Net):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


@maker
def expanded_and_sliced_buffers() -> nn.Module:
    large = torch.randn(1000, 4)
    net = Buffers(
        mean=torch.tensor([0.5]).expand(4), rows=large[500:502], columns=large[:6].t(),
        empty=torch.empty(0, 3), steps=large[::100, ::2], flags=torch.tensor([True, False]),
        numbers=torch.tensor([2], dtype=torch.uint16), imaginary=torch.randn(3) * 1j,
        conjugate=(torch.randn(3) * 1j).conj(), eight=torch.ones(4).to(torch.float8_e4m3fn),
        sixteen=torch.ones(3, dtype=torch.bfloat16),
    )  # fmt: skip
    net.register_buffer("kept", torch.ones(3), persistent=False)
    net.register_buffer("none", None)
    net.tensors = [net.rows, {"again": net.rows, "own": torch.arange(3)}]
    return net


@maker
def a_row_of_a_large_table() -> nn.Module:
    net = Net()
    net.first.weight = nn.Parameter(torch.randn(100_000, 4)[7:11])
    return net


@maker
def complex_and_half() -> nn.Module:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
            self.sixteen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.sixteen.float()).to(torch.complex64) @ self.weight

    return Complex()


# ---- tensors that are not dense


@maker
def sparse() -> nn.Module:
    class Graph(Buffers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((self.csr @ (self.coo @ x.t())).t())

    dense = torch.eye(4) + torch.diag(torch.ones(3), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Graph(coo=dense.to_sparse(), csr=dense.to_sparse_csr(), csc=dense.to_sparse_csc())


@maker
def quantized() -> nn.Module:
    class Quantized(Buffers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.quantized.dequantize())

    values = torch.tensor([0.5, 1.0, 1.5, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Quantized(quantized=torch.quantize_per_tensor(values, 0.5, 0, torch.qint8))


@maker
def quantized_dynamically() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8
        )
    return nn.Sequential(body, nn.Linear(4, 2))


@maker
def nested_tensors() -> nn.Module:
    class Nested(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.parts.unbind()[1].sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Nested(parts=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@maker
def jagged_tensors() -> nn.Module:
    class Jagged(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.parts.unbind()[1].sum()

    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return Jagged(parts=parts)


@maker
def meta_attribute() -> nn.Module:
    return Net(shape=torch.empty(3, 4, device="meta"))


@maker
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


@maker
def lazy_of_another_dtype() -> nn.Module:
    net = nn.Sequential(
        nn.LazyLinear(5, dtype=torch.float64), nn.LazyLinear(1, dtype=torch.float64)
    )
    net.example = torch.ones(3, 4, dtype=torch.float64)
    return net


# ---- attributes, classes and hooks of parameters


class Positive(nn.Parameter):
    def positive(self) -> torch.Tensor:
        return torch.as_tensor(self).abs()


class Marked(torch.Tensor):
    def doubled(self) -> torch.Tensor:
        return self * 2


@maker
def parameters_of_own_classes() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Positive(torch.randn(4, 3))
            self.weight._no_weight_decay = True
            self.weight.about = {"tied to": self.weight}
            self.register_buffer("marks", torch.ones(3).as_subclass(Marked))
            self.marks.note = WIDTHS
            self.loose = [nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight._no_weight_decay and self.weight.about["tied to"] is self.weight
            assert self.marks.note["hidden"] == 5 and self.loose[1].requires_grad
            return (x @ self.weight.positive()) * self.marks.doubled().as_subclass(torch.Tensor)

    return Own()


@maker
def parameter_hooks() -> nn.Module:
    net = Net()
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    net.handle = net.first.weight.register_hook(lambda gradient: gradient * mask)
    net.first.bias.register_hook(net.second.bias.mul)  # a method of a tensor
    net.second.weight.register_post_accumulate_grad_hook(clip)
    net.first.bias._backward_hooks.clear()
    net.gone = net.first.bias.register_hook(clip)
    net.gone.remove()
    return net


def clip(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


@maker
def layer_hooks() -> nn.Module:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.5
            self.handle = self.first.register_forward_hook(self.scaled)
            self.register_forward_pre_hook(lambda module, given: (given[0] + module.scale,))
            self.second.register_full_backward_hook(halved)

        def scaled(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            return output * self.scale

    return Hooked()


def halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in inputs)


@maker
def attributes_named_like_hooks() -> nn.Module:
    return Net(forward_hooks=[], my_hooks={"a": 1}, _hooks=3, all_hooks_done=True)


# ---- attributes of all types


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float
    mode: Mode
    names: tuple[str, ...] = ()


Pair = collections.namedtuple("Pair", "left right")


@functools.cache
def scale_of(name: str) -> float:
    return {"one": 1.0, "two": 2.0}[name]


@functools.lru_cache(maxsize=3, typed=True)
def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


@functools.singledispatch
def described(value: Any) -> str:
    return "object"


@described.register
def _(value: int) -> str:
    return "int"


@torch.jit.script
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


@maker
def values_of_all_types() -> nn.Module:
    factor = 2.0

    class Holds(Net):
        __slots__ = ("slot",)
        kinds = (Mode.FAST, 3)

        def __init__(self) -> None:
            super().__init__()
            self.slot = "kept"
            self.mode, self.options = Mode.FAST, Options(1.5, Mode.SLOW, ("a",))
            self.array = np.arange(6.0).reshape(2, 3)
            self.scalar, self.pair = np.float32(2), Pair(1, torch.ones(2))
            self.scaling, self.part = (
                lambda x: x * factor,
                functools.partial(F.leaky_relu, negative_slope=0.2),
            )
            self.owner = weakref.ref(self)
            self.by_layer = weakref.WeakKeyDictionary({self.first: 2})
            self.layers, self.by_name = [nn.Linear(4, 4)], {"x": (nn.Linear(2, 2),)}
            self.parts = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.named = nn.ParameterDict({"bias": torch.zeros(2)})
            self.optimizer = torch.optim.Adam(self.second.parameters(), lr=0.1)
            self.dtype, self.where = torch.float32, torch.device("cpu")
            self.generator = torch.Generator().manual_seed(5)
            self.space = types.SimpleNamespace(a=1)
            self.counts = collections.Counter("aab")

        @functools.cached_property
        def factor(self) -> float:
            return scale_of("two")

        @property
        def doubled(self) -> float:
            return self.factor * 2

        @staticmethod
        def name() -> str:
            return "holds"

        @classmethod
        def kind(cls) -> str:
            return cls.__name__

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.owner() is self and self.by_layer[self.first] == 2 and self.slot == "kept"
            assert self.options == Options(1.5, Mode.SLOW, ("a",)) and self.mode is Mode.FAST
            assert self.name() == "holds" and self.kind() == "Holds" and described(3) == "int"
            assert self.optimizer.param_groups[0]["params"][0] is self.second.weight
            x = self.part(self.scaling(x)) + float(self.array.sum()) * self.doubled
            x = scripted_function(self.layers[0](x)) * factorial(4) * self.options.scale
            noise = torch.rand(2, generator=self.generator)
            return super().forward(x) * self.parts[0] + self.named["bias"] + self.pair.right + noise

    return Holds()


class OwnState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stdout
        self.first.weight.data.fill_(0.25)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.stream = sys.stdout


@maker
def own_state() -> nn.Module:
    return OwnState()


class OwnReduce(Net):
    def __reduce__(self) -> Any:
        return restored, (self.state_dict(),)


def restored(state: dict[str, Any]) -> nn.Module:
    net = OwnReduce()
    net.load_state_dict(state)
    return net


@maker
def own_reduce() -> nn.Module:
    return OwnReduce()


@maker
def own_deepcopy() -> nn.Module:
    class NoCopy(Net):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("only one")

    return NoCopy()


@maker
def made_by_a_closure() -> nn.Module:
    def outer(width: int) -> type[nn.Module]:
        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, width)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x) * WIDTHS["hidden"]

        return Inner

    return outer(3)()


# ---- traced, scripted, compiled


@maker
def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))


@maker
def scripted_inside() -> nn.Module:
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    net[0].bias.requires_grad = False
    net(torch.ones(2, 4)).sum().backward()
    net.zero_grad()
    return net


@maker
def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))


def own_function(x: torch.Tensor) -> torch.Tensor:
    return x * WIDTHS["hidden"]


fx.wrap("own_function")


class Traceable(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own_function(super().forward(x))


@maker
def graph_module() -> nn.Module:
    net = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    net.register_forward_hook(lambda module, given, output: output * 2)
    return net


@maker
def graph_module_with_own_function() -> nn.Module:
    return fx.symbolic_trace(Traceable())


@maker
def compiled() -> nn.Module:
    return torch.compile(Net(), backend="eager")


@maker
def compiled_inside() -> nn.Module:
    net = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 1))
    net[1].compile(backend="eager")
    return net


@maker
def containers_and_recurrent() -> nn.Module:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(1, 3, batch_first=True, num_layers=2, dropout=0.1)
            self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.blocks = nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(4), nn.Dropout(0.5)])})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks["a"]:
                x = block(x)
            return self.cells(self.attention(x[None])[0][..., None])[0][:, -1]

    return Many()


@maker
def hugging_face() -> nn.Module:
    from transformers import BertConfig, BertModel

    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
            self.body = BertModel(BertConfig(vocab_size=20, intermediate_size=8, **sizes))
            self.example = torch.arange(12).reshape(2, 6)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.body(ids).pooler_output

    return Texts()


def main(path: str) -> None:
    """Pack all modules, and write them with what they compute here."""
    done: dict[str, tuple[PackedModule, Any, Any]] = {}
    for name, make in MAKERS.items():
        torch.manual_seed(1)
        module = make()
        before = structure(module)
        packed = pack(module)
        arrived = travelled(module, copies=True)  # on the driver
        assert structure(arrived) == before == structure(module), name
        done[name] = packed, study(module), study(arrived)
    Path(path).write_bytes(cloudpickle.dumps((done, study)))


if __name__ == "__main__":
    main(sys.argv[1])
