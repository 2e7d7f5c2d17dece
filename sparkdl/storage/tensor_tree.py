"""Nested Python values as JSON and tensors, and back, bit for bit.

No pickle: only the kinds listed in `pack` are accepted, so reading a tree runs no code. JSON keeps
ints of any size and finite floats exactly; everything else that JSON lacks is a one-key object
such as ``{"tuple": [...]}``, and a dict is ``{"dict": [[key, value], ...]}``, which keeps the
types of keys and their order.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a file can hold, under safetensors' names."""
_SPARSE: dict[torch.layout, tuple[Callable[[torch.Tensor], Any], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values, torch.Tensor.is_coalesced),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
}
"""Functions that take a sparse tensor apart, by its layout."""
_NUMPY_KINDS = "biufcSUmM"
_SEQUENCES: dict[type, str] = {
    deque: "deque", set: "set", frozenset: "frozenset", torch.Size: "size",
}  # fmt: skip
_FACTORIES: dict[Any, str] = {
    None: "none", list: "list", dict: "dict", int: "int", float: "float", set: "set",
}  # fmt: skip
"""Values that a defaultdict may make for keys that it lacks."""
_LARGE_INT = 1 << 63
"""Larger ints are written in hexadecimal: Python refuses to print very long decimal ones."""


def pack(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take a tree apart into a JSON value and the tensors that it names; copies no tensor.

    Accepts None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict
    (also OrderedDict, Counter and defaultdict) with str or int keys, tensors, their sizes, dtypes
    and devices, numpy arrays and numpy scalars; CheckpointError names path and type of anything
    else. Tensors are named after their path. Those that are the same memory (tied
    weights) are stored once and come back as one tensor.
    """
    packer = _Packer()
    return packer.pack(tree, ()), packer.tensors


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The size of tensors, of which some may be sparse or quantized."""
    parts = ([t] if t.layout is torch.strided else pack(t)[1].values() for t in tensors)
    return sum(part.nbytes for found in parts for part in found)


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the tree that `pack` took apart; CheckpointError for what it cannot have made."""
    try:
        return _unpack(value, tensors)
    except (
        LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"the JSON half of a checkpoint is malformed ({type(error).__name__}: {error}); "
            f"resume from an older checkpoint"
        ) from error


@dataclass(frozen=True)
class Snapshot:
    """A packed tree whose tensors are on the CPU, private copies unless `snapshot` says so."""

    value: Any
    tensors: dict[str, torch.Tensor]


def snapshot(tree: Any, reuse: Snapshot | None = None, *, copies: bool = True) -> Snapshot:
    """Copy a tree (see `pack`) to CPU memory, so that training may go on changing the original.

    Without ``copies`` what lies in CPU memory already is not copied, and must not change.

    The buffers of ``reuse``, an earlier snapshot that nobody needs any more, are overwritten where
    name, shape and dtype match, because fresh memory costs a page fault every 4 KiB.
    """
    value, tensors = pack(tree)
    old = {} if reuse is None else reuse.tensors
    with torch.no_grad():
        found = {
            name: _copy(t, old.get(name)) if copies or not t.is_cpu else t.detach().contiguous()
            for name, t in tensors.items()
        }
    return Snapshot(value, found)


def _copy(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        # Pinned memory makes the copy from a GPU several times faster.
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor)


class _Packer:
    """One walk over a tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}

    def pack(self, node: Any, path: tuple[str, ...]) -> Any:
        if node is None or type(node) in (bool, str):
            return node
        if type(node) is int:
            return node if abs(node) < _LARGE_INT else {"int": hex(node)}
        if type(node) is float:
            return node if np.isfinite(node) else {"float": struct.pack("<d", node).hex()}
        if type(node) is bytes:
            return {"bytes": _text(node)}
        if isinstance(node, torch.Tensor):
            return self._any_tensor(node, path)
        if isinstance(node, np.ndarray | np.generic):
            return self._numpy(node, path)
        return self._container(node, path)

    def _container(self, node: Any, path: tuple[str, ...]) -> Any:
        if type(node) is list:
            return [self.pack(item, (*path, str(i))) for i, item in enumerate(node)]
        if type(node) is tuple:
            return {"tuple": [self.pack(item, (*path, str(i))) for i, item in enumerate(node)]}
        if type(node) is dict:
            return {"dict": self._items(node, path)}
        if type(node) in _SEQUENCES:
            items = [
                self.pack(item, (*path, str(i))) for i, item in enumerate(_ordered_items(node))
            ]
            more = {"maxlen": node.maxlen} if isinstance(node, deque) else {}
            return {_SEQUENCES[type(node)]: items, **more}
        if type(node) is defaultdict and node.default_factory in _FACTORIES:
            made = _FACTORIES[node.default_factory]
            return {"default": self._items(node, path), "factory": made}
        if type(node) is complex:
            return {"complex number": [self.pack(node.real, path), self.pack(node.imag, path)]}
        if type(node) in (torch.dtype, torch.device):
            return {"torch": str(node).removeprefix("torch."), "kind": type(node).__name__}
        if type(node) is Counter:
            return {"counter": self._items(node, path)}
        if type(node) is OrderedDict:
            # nn.Module.state_dict() keeps the versions of its modules in an attribute.
            attributes = self.pack(dict(vars(node)), (*path, "attributes"))
            return {"ordered": self._items(node, path), "attributes": attributes}
        raise _refused(node, path, "use plain dicts, lists, numbers, strings, bytes and tensors")

    def _items(self, node: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        for key in node:
            if type(key) not in (str, int):
                raise _refused(key, path, "keys must be str or int", what="a key")
        return [
            [self.pack(key, path), self.pack(value, (*path, str(key)))]
            for key, value in node.items()
        ]

    def _any_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise _refused(tensor, path, "convert it to a plain tensor")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            tensor = tensor.detach().as_subclass(torch.Tensor)
        if tensor.layout in _SPARSE:
            parts = [get(tensor.detach()) for get in _SPARSE[tensor.layout]]
            about = [str(tensor.layout).removeprefix("torch."), list(tensor.shape)]
            return {"sparse": self.pack(parts, path), "of": about}
        if tensor.is_quantized:
            parts = [tensor.int_repr(), *_quantizer(tensor)]
            return {"quantized": self.pack(parts, path), "of": str(tensor.dtype)[6:]}
        return {"complex" if tensor.is_complex() else "tensor": self._tensor(tensor, path)}

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise _refused(tensor, path, "only dense tensors with data can be stored")
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        if plain.dtype not in DTYPES:
            raise _refused(tensor, path, f"dtype {plain.dtype} cannot be stored")
        # Two tensors without elements may share an address and still be two tensors.
        key = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride(), plain.device)
        if plain.numel() and plain.data_ptr() == tensor.data_ptr():
            if key not in self._names:
                self._names[key] = self._add(plain, path)
            return self._names[key]
        return self._add(plain, path)

    def _add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = base = ".".join(path) or "tensor"
        count = 1
        while name in self.tensors or name == "__metadata__":  # the latter belongs to safetensors
            count += 1
            name = f"{base}#{count}"
        self.tensors[name] = tensor
        return name

    def _numpy(self, node: np.ndarray[Any, Any] | np.generic, path: tuple[str, ...]) -> Any:
        kind = node.dtype.str
        if node.dtype.kind not in _NUMPY_KINDS or type(node) not in (np.ndarray, node.dtype.type):
            raise _refused(node, path, f"numpy dtype {node.dtype} cannot be stored")
        if isinstance(node, np.generic):
            return {"scalar": _text(node.tobytes()), "dtype": kind}
        data = np.ndarray(node.nbytes, np.uint8, bytearray(node.tobytes()))
        name = self._add(torch.from_numpy(data), path)
        return {"numpy": name, "dtype": kind, "shape": list(node.shape)}


def _refused(
    node: Any, path: tuple[str, ...], remedy: str, what: str = "a value"
) -> CheckpointError:
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    return CheckpointError(
        f"{what} at {'.'.join(path) or 'the top'} has type {kind}, which a checkpoint cannot "
        f"hold; {remedy}"
    )


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    kind = next(iter(value), "nothing")
    return _READERS[kind](value, tensors)


def _pairs(pairs: Any, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(_unpack(key, tensors), _unpack(item, tensors)) for key, item in pairs]


def _ordered(value: Any, tensors: Mapping[str, torch.Tensor]) -> OrderedDict[Any, Any]:
    result = OrderedDict(_pairs(value["ordered"], tensors))
    vars(result).update(_unpack(value["attributes"], tensors))
    return result


def _listed(values: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [_unpack(item, tensors) for item in values]


def _of_torch(kind: str, name: str) -> Any:
    if kind == "device":
        return torch.device(name)
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name}")
    return found


def _array(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    data = bytearray(tensors[value["numpy"]].numpy().tobytes())  # writable, as the original was
    return np.ndarray(value["shape"], _dtype(value), data)


def _dtype(value: Any) -> np.dtype[Any]:
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype}")
    return dtype


def _sparse(value: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts, (layout, shape) = _unpack(value["sparse"], tensors), value["of"]
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts[0], parts[1], shape, is_coalesced=parts[2], check_invariants=True
        )
    known = {str(key): key for key in _SPARSE}
    first, second, numbers = parts
    return torch.sparse_compressed_tensor(
        first, second, numbers, size=shape, layout=known[f"torch.{layout}"], check_invariants=True
    )


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    """Return scale, zero point and axis, which make whole numbers of a quantized tensor real."""
    if tensor.qscheme() == torch.per_tensor_affine:
        return [tensor.q_scale(), tensor.q_zero_point(), None]
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [scales, zero_points, tensor.q_per_channel_axis()]


def _quantized(value: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    whole, scale, zero_point, axis = _unpack(value["quantized"], tensors)
    dtype = getattr(torch, value["of"])
    if axis is None:
        made = torch._empty_affine_quantized(
            whole.shape, scale=scale, zero_point=zero_point, dtype=dtype
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            whole.shape, scales=scale, zero_points=zero_point, axis=axis, dtype=dtype
        )
    made.untyped_storage().copy_(whole.contiguous().untyped_storage())
    return made


_READERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "int": lambda value, _: int(value["int"], 16),
    "float": lambda value, _: struct.unpack("<d", bytes.fromhex(value["float"]))[0],
    "bytes": lambda value, _: base64.b64decode(value["bytes"], validate=True),
    "tuple": lambda value, tensors: tuple(_unpack(item, tensors) for item in value["tuple"]),
    "dict": lambda value, tensors: dict(_pairs(value["dict"], tensors)),
    "counter": lambda value, tensors: Counter(dict(_pairs(value["counter"], tensors))),
    "ordered": _ordered,
    "deque": lambda value, tensors: deque(_listed(value["deque"], tensors), value["maxlen"]),
    "set": lambda value, tensors: set(_listed(value["set"], tensors)),
    "frozenset": lambda value, tensors: frozenset(_listed(value["frozenset"], tensors)),
    "size": lambda value, tensors: torch.Size(_listed(value["size"], tensors)),
    "default": lambda value, tensors: defaultdict(
        {made: kind for kind, made in _FACTORIES.items()}[value["factory"]],
        _pairs(value["default"], tensors),
    ),
    "complex number": lambda value, tensors: complex(*_listed(value["complex number"], tensors)),
    "torch": lambda value, _: _of_torch(value["kind"], value["torch"]),
    "tensor": lambda value, tensors: tensors[value["tensor"]],
    "complex": lambda value, tensors: torch.view_as_complex(tensors[value["complex"]]),
    "sparse": _sparse,
    "quantized": _quantized,
    "numpy": _array,
    "scalar": lambda value, _: np.frombuffer(
        base64.b64decode(value["scalar"], validate=True), dtype=_dtype(value)
    )[0],
}


def _ordered_items(node: Any) -> list[Any]:
    """The items of a sequence or of a set, in an order that does not depend on the process."""
    return sorted(node, key=repr) if isinstance(node, set | frozenset) else list(node)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
