"""States of replicas in pieces: their mean is formed piece by piece, and nobody needs them whole.

A state is a frame and pieces. The frame is the tree with its small tensors; it says in place of
each large tensor what that is. A piece has some of the values of one large tensor. Replicas cut
equal tensors at equal places, so a piece of the mean is the mean of the pieces, with the same bits
as the mean of whole states.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.comm.compression.compression import Codec, Compression
from sparkdl.comm.compression.dense_reduce_scatter import cut as slices
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import DTYPES, snapshot
from sparkdl.sync.averaging.mean import CHANGES, merge, weighted_mean
from sparkdl.sync.module_tensors import is_extra

FRAME = "state"
"""Name of the frame. That of a piece is ``state/<path of its tensor><shape>#<number>``: buffers of
other shapes, which are each replica's own, have no mean."""
_LEAST_PIECE, _MOST_PIECE, _HELD_BYTES = 1 << 16, 4 << 20, 64 << 20
"""Sizes of pieces, and what the pieces of one place may have in all: a task that takes their mean
holds them together."""
_SMALL_BYTES = 1024
"""Tensors up to this size stay in the frame."""
_CUT = "the pieces of"
"""Key in the frame of what stands for a large tensor."""
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


Piece = tuple[str, bytes]
"""Name and data of some values of a tensor of one replica's state, or of its frame."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The rule by which states are cut; picklable and small, as executors get it."""

    piece_bytes: int
    """Most bytes of a piece, before compression."""
    compression: Compression | None = None
    """Compression of `CHANGES`; it must have codecs."""
    count_equally: bool = False
    """True if each replica counts as much as any other, whatever its weight."""

    @classmethod
    def of(cls, num_replicas: int, **options: Any) -> Pieces:
        """The more replicas there are, the smaller are the pieces."""
        size = min(_MOST_PIECE, max(_LEAST_PIECE, _HELD_BYTES // num_replicas))
        return cls(piece_bytes=size, **options)

    def cut(self, state: Mapping[str, Any], weight: float) -> Iterator[Piece]:
        """Take a replica's state apart; ``weight``, which is not 0, is what it counts."""
        weight = 1.0 if self.count_equally else weight
        large: dict[str, torch.Tensor] = {}
        framed = {"weight": weight, "state": _framed(state, (), large, {})}
        yield FRAME, _encoded(framed)
        for name, tensor in large.items():
            yield from self._cut_tensor(name, tensor, weight)

    def mean(self, name: str, pieces: Sequence[bytes]) -> bytes:
        """The mean of the pieces of one name, which are given in the order of replicas."""
        if len(pieces) == 1:
            return pieces[0]
        if name == FRAME:
            parts = [decode(piece, "the frame of a state") for piece in pieces]
            weights = [part["weight"] for part in parts]
            state = merge([part["state"] for part in parts], weights)
            return _encoded({"weight": sum(weights), "state": state})
        read = [self._read(name, piece) for piece in pieces]
        mean = read[0][1]
        if mean.is_floating_point():
            mean = weighted_mean([values for _, values in read], [weight for weight, _ in read])
        return _piece(sum(weight for weight, _ in read), mean)

    def put_together(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The state whose pieces, in any order, these are; inverse of `cut`."""
        frame: Any = None
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name, piece in pieces:
            if name == FRAME:
                frame = decode(piece, "the frame of a state")["state"]
            else:
                tensor, _, number = name.rpartition("#")
                parts.setdefault(tensor, {})[int(number)] = self._read(name, piece)[1]
        state: dict[str, Any] = _filled(frame, parts, {})
        return state

    def _cut_tensor(self, name: str, tensor: torch.Tensor, weight: float) -> Iterator[Piece]:
        flat, shape = tensor.detach().cpu().reshape(-1), tuple(tensor.shape)
        bounds = self._bounds(shape, tensor.dtype)
        codecs = self._codecs(name, shape, tensor.dtype)
        for number, (start, stop) in enumerate(bounds):
            values, key = flat[start:stop], f"{name}#{number}"
            if start == stop:
                continue
            if codecs is None:
                yield key, _piece(weight, values)
                continue
            message = torch.zeros(codecs[number].message_bytes, dtype=torch.uint8)
            codecs[number].encode(values, torch.zeros_like(values), message)
            yield key, _piece(weight, message, coded=[DTYPES[tensor.dtype], shape])

    def _bounds(self, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
        numel = math.prod(shape)
        return slices(numel, -(-numel * dtype.itemsize // self.piece_bytes))

    def _codecs(
        self, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Sequence[Codec] | None:
        """Return the codecs of a tensor's pieces; None: it is not compressed."""
        if self.compression is None or not name.startswith(f"{FRAME}/{CHANGES}/"):
            return None
        return self.compression.codecs_of(tuple(shape), len(self._bounds(shape, dtype)), dtype)

    def _read(self, name: str, piece: bytes) -> tuple[float, torch.Tensor]:
        """Weight and values of a piece; they may be a view of it."""
        end = piece.index(b"\n") + 1
        header = json.loads(piece[:end])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            values = torch.frombuffer(piece, dtype=_DTYPES[header["dtype"]], offset=end)
        if "coded" in header:
            dtype, shape = _DTYPES[header["coded"][0]], header["coded"][1]
            number = int(name.rpartition("#")[2])
            start, stop = self._bounds(shape, dtype)[number]
            codecs, message = self._codecs(name, shape, dtype), values
            assert codecs is not None
            values = torch.zeros(stop - start, dtype=dtype)
            codecs[number].decode_add(message, values)
        return header["weight"], values


def _framed(node: Any, path: tuple[str, ...], large: dict[str, Any], known: dict[Any, str]) -> Any:
    """The tree with a note in place of each large tensor, which goes to ``large``."""
    if path and is_extra(path[-1]):  # replicas need not have equal ones
        return node
    if isinstance(node, dict):
        return {key: _framed(v, (*path, str(key)), large, known) for key, v in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_framed(v, (*path, str(i)), large, known) for i, v in enumerate(node))
    is_plain = isinstance(node, torch.Tensor) and node.layout is torch.strided
    if not is_plain or node.dtype not in DTYPES or node.nbytes <= _SMALL_BYTES:
        return node
    memory = (node.data_ptr(), node.dtype, node.shape, node.stride(), node.device)
    shape = list(node.shape)
    name = known.setdefault(
        memory, f"{'/'.join((FRAME, *path))}{shape}"
    )  # tied weights travel once
    large[name] = node
    return {_CUT: name, "shape": shape}


def _filled(
    node: Any, parts: Mapping[str, Mapping[int, torch.Tensor]], made: dict[str, Any]
) -> Any:
    """The tree of a frame with its large tensors."""
    if isinstance(node, dict):
        if _CUT not in node:
            return {key: _filled(value, parts, made) for key, value in node.items()}
        name = node[_CUT]
        if name not in made:
            numbers = sorted(parts[name])
            made[name] = torch.cat([parts[name][n] for n in numbers]).reshape(node["shape"])
        return made[name]
    if type(node) in (list, tuple):
        return type(node)(_filled(value, parts, made) for value in node)
    return node


def _piece(weight: float, values: torch.Tensor, **more: Any) -> bytes:
    header = json.dumps({"weight": weight, "dtype": DTYPES[values.dtype], **more}).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"  # the values are aligned
    return b"".join([header, values.contiguous().view(torch.uint8).numpy().data])


def _encoded(tree: Any) -> bytes:
    return b"".join(encode(snapshot(tree, copies=False)))
