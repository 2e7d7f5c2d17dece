"""One list of all that a module holds in tensors: its parameters and every buffer, by name.

Averages, rounds, checkpoints, best weights and the way back to the driver use this list, and not
``state_dict()``, which leaves buffers out that are not persistent, and which users override.
Forward may replace a buffer by one of another shape, set it to None, or register one.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.sync.frozen_layers import is_held

EXTRA = "_extra_state"
"""Key, behind a layer's name, of what its ``get_extra_state`` gives, as torch has it."""
_COLUMNS = 1024
_SMALL = 1 << 16
"""Numbers of a tensor that is looked at together with others."""


class Place(NamedTuple):
    """The place where a module holds a parameter or a buffer, which may be None now."""

    name: str
    """As in a state dict."""
    owner: Any
    """The layer's dict of parameters or of buffers."""
    key: str
    kind: str
    """``parameter``, ``buffer``, or ``fleeting`` for a buffer that is not persistent."""
    is_held: bool
    """True if it belongs to a layer that frozen patterns hold, see `frozen_layers`."""

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor of this moment, without gradient; a plain one also of a user's own class."""
        value: torch.Tensor | None = self.owner[self.key]
        if value is None or nn.parameter.is_lazy(value):
            return value
        if type(value) in (torch.Tensor, nn.Parameter) or _is_wrapper(value):
            return value.detach()
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(torch.Tensor)

    def set(self, value: torch.Tensor | None) -> None:
        """Overwrite it; what has another shape or layout, or lies twice in memory, is replaced."""
        now = self.value
        if now is not None and nn.parameter.is_lazy(now) and value is not None:
            now.materialize(value.shape, dtype=value.dtype)
        if value is None:
            self.owner[self.key] = None
        elif now is not None and _can_hold(now, value):
            now.copy_(value)
        elif self.kind == "parameter":
            self.owner[self.key].data = value.detach().to(self.owner[self.key].device, copy=True)
        else:
            device = value.device if now is None else now.device
            self.owner[self.key] = value.detach().to(device, copy=True)


def places_of(module: nn.Module, *, aliases: bool = True) -> Iterator[Place]:
    """All parameters and buffers in the order of a state dict; without ``aliases`` each once."""
    seen: set[int] = set()
    for path, layer in module.named_modules(remove_duplicate=not aliases):
        prefix = f"{path}." if path else ""
        fleeting = getattr(layer, "_non_persistent_buffers_set", ())
        for is_buffer, owner in enumerate((layer._parameters, layer._buffers)):
            for key, value in list(owner.items()):
                if (value is None and not is_buffer) or (not aliases and id(value) in seen):
                    continue
                if value is not None:
                    seen.add(id(value))
                kind = ("fleeting" if key in fleeting else "buffer") if is_buffer else "parameter"
                yield Place(prefix + key, owner, key, kind, is_held(layer))


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """All that a module holds, by name: its own tensors, not copies, and extra states."""
    found: dict[str, Any] = {place.name: place.value for place in places_of(module)}
    for path, layer in _with_extra(module):
        found[path] = layer.get_extra_state()
    return found


@torch.no_grad()
def give_tensors(
    module: nn.Module, values: Mapping[str, Any], *, removes_others: bool = False
) -> None:
    """Give a module what `tensors_of` gave of one of the same classes.

    A tensor keeps its place in memory if it can. A buffer that the module has not got is
    registered, and not persistent. What ``values`` lack stays as it is, unless buffers that others
    have registered are removed.

    Raises:
        ConfigError: ``values`` have something of a layer that the module has not got.
    """
    left = dict(values)
    for place in places_of(module):
        if place.name in left:
            place.set(left.pop(place.name))
        elif removes_others and place.kind != "parameter" and place.name not in values:
            del place.owner[place.key]
    for path, layer in _with_extra(module):
        if path in left:
            layer.set_extra_state(left.pop(path))
    layers = dict(module.named_modules(remove_duplicate=False))
    for name, value in left.items():
        path, _, key = name.rpartition(".")
        if path not in layers or key in layers[path]._parameters or is_extra(key):
            raise ConfigError(
                f"the module has no {name!r}, which training has made; make all layers and "
                "parameters in __init__, not in forward"
            )
        layers[path].register_buffer(key, value, persistent=False)


def misfit(module: nn.Module) -> str | None:
    """Return the name of a layer whose numbers do not fit its weights, as a file may have it.

    Kernels for CPUs believe them: those of recurrent layers read memory behind the weights, and
    attention divides by its number of heads.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            heads, width = part.num_heads, part.embed_dim
            if type(heads) is not int or heads < 1 or width != heads * part.head_dim:
                return str(name)
        if isinstance(part, nn.RNNBase) and not _fits(part):
            return str(name)
    return None


def _fits(part: nn.RNNBase) -> bool:
    """Return True if a recurrent layer has the weights that its sizes ask for."""
    has_projection = part.proj_size > 0
    per_layer = (1 + part.bidirectional) * (2 + 2 * part.bias + has_projection)
    if len(part._flat_weights) != part.num_layers * per_layer:
        return False
    like = nn.RNNBase(
        part.mode, part.input_size, part.hidden_size, part.num_layers, bias=part.bias,
        bidirectional=part.bidirectional, proj_size=part.proj_size, device="meta",
    )  # fmt: skip
    own, others = ([getattr(w, "shape", None) for w in one._flat_weights] for one in (part, like))
    return all(a in (None, b) for a, b in zip(own, others, strict=True))


def check_sizes(module: nn.Module) -> None:
    """Raise CheckpointError if what a checkpoint has given to a module has a `misfit`."""
    name = misfit(module)
    if name is not None:
        raise CheckpointError(
            f"the checkpoint gives the layer {name!r} sizes that its weights lack; resume from an "
            "older one"
        )


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with an extra state, by its key."""
    for path, layer in module.named_modules(remove_duplicate=False):
        own = getattr(type(layer), "get_extra_state", nn.Module.get_extra_state)
        if own is not nn.Module.get_extra_state:
            yield (f"{path}.{EXTRA}" if path else EXTRA), layer


def is_extra(key: Any) -> bool:
    """True of the key of an extra state, of which nobody knows the mean."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA


def _can_hold(now: torch.Tensor, value: torch.Tensor) -> bool:
    is_alike = (now.shape, now.dtype, now.layout) == (value.shape, value.dtype, value.layout)
    is_strided = now.layout is torch.strided
    return is_alike and not now.is_meta and not (is_strided and _lies_twice(now))


def _lies_twice(tensor: torch.Tensor) -> bool:
    """True if numbers of a tensor share their memory, as those of an expanded one."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in strides)


def shape_of(value: torch.Tensor | None) -> list[int] | None:
    """The shape of what may be None, as a list."""
    return None if value is None else list(value.shape)


def is_same(one: Any, other: Any) -> bool:
    """True if two tensors, or extra states, are equal bit for bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is None and other is None
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided:
        return True
    bits = [as_bits(tensor.detach().to(one.device)) for tensor in (one, other)]
    return torch.equal(*bits)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as whole numbers, one after the other; NaN differs from no NaN."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(kind)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's tensors."""
    some = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if some is None else some.device


def trains(module: nn.Module) -> dict[str, bool]:
    """Return which parameters train, by name."""
    named = nn.Module.named_parameters(module, remove_duplicate=False)
    return {name: parameter.requires_grad for name, parameter in named}


def set_trains(module: nn.Module, flags: Mapping[str, bool]) -> bool:
    """Restore what `trains` gave; True if something has changed."""
    changed = False
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        if flags.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad, changed = flags[name], True
    return changed


def fingerprint(tensor: torch.Tensor | None) -> int:
    """A number that differs, in all likelihood, where one bit of two tensors does; int32.

    Sums over rows and columns of the bits tell where they are, at the speed of memory.
    """
    if tensor is None or tensor.layout is not torch.strided:
        return 0
    bits = as_bits(tensor)
    whole = len(bits) // _COLUMNS * _COLUMNS
    grid = bits[:whole].view(-1, _COLUMNS)
    sums = [grid.sum(0), grid.sum(1), bits[whole:].long()]
    data = torch.cat([one.long() for one in sums]).cpu().numpy().tobytes()
    return zlib.crc32(data, len(bits))


def fingerprint_of_all(tensors: Iterable[torch.Tensor | None]) -> str:
    """The same of many tensors together, of which small ones would take longer one by one."""
    found: list[int] = []
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel() < _SMALL and tensor.layout is torch.strided:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.flatten())
        else:
            found.append(fingerprint(tensor))
    return str([*found, *(fingerprint(torch.cat(some)) for some in small.values())])


def moved(module: nn.Module, first: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Frozen parameters that are not what they were when `fingerprints` gave ``first``."""
    known = [place for place in _frozen(module) if place.name in first]
    found = {p.name: p.value for p in known if fingerprint(p.value) != first[p.name]}
    return {name: value for name, value in found.items() if value is not None}


def fingerprints(module: nn.Module) -> dict[str, int]:
    """Return fingerprints of the frozen parameters that are whole here, by name; see `moved`."""
    return {place.name: fingerprint(place.value) for place in _frozen(module)}


def _frozen(module: nn.Module) -> Iterator[Place]:
    for place in places_of(module, aliases=False):
        is_frozen = place.kind == "parameter" and not place.owner[place.key].requires_grad
        if is_frozen and not _is_wrapper(place.value):
            yield place


class Agreement:
    """The tensors that ranks must make equal, besides what a strategy averages anyway.

    That is all buffers, unless frozen patterns hold them. Of what should be equal, which is frozen
    parameters, held buffers, and ``trained`` parameters, it is what is not: forward may have
    changed it. Ranks compare digests first, which is all that they do where nothing is odd.
    """

    def __init__(self, module: nn.Module, trained: Iterable[torch.Tensor] | None = None) -> None:
        """Note what this rank has. ``trained``: parameters that training leaves equal."""
        places = [p for p in places_of(module, aliases=False) if _is_summed(p.value)]
        wanted = {id(parameter) for parameter in trained or ()}
        self._module = module
        self._buffers = [p for p in places if p.kind != "parameter" and not p.is_held]
        self._still = [
            p
            for p in places
            if (p.kind != "parameter" and p.is_held)
            or (p.kind == "parameter" and not p.owner[p.key].requires_grad)
            or id(p.owner[p.key]) in wanted
        ]
        self._described = json.dumps([_described(place) for place in self._buffers])
        numbers = fingerprint_of_all([place.value for place in self._still])
        self.digest = zlib.crc32(numbers.encode(), zlib.crc32(self._described.encode()))
        """Digest of what this rank has; less than 2**32."""

    def places(
        self, comm: Communicator, digests: Sequence[int], counts: Sequence[bool]
    ) -> list[Place]:
        """The places of what must be made equal, alike on all ranks. Collective.

        Args:
            comm: the ranks.
            digests: of all ranks.
            counts: which ranks' values count; others get theirs.

        Raises:
            ConfigError: a persistent buffer has other shapes on other ranks; on all ranks alike.
        """
        if len(set(digests)) == 1:
            return [place for place in self._buffers if place.value is not None]
        still = [[*_described(place), fingerprint(place.value)] for place in self._still]
        mine = json.dumps([json.loads(self._described), still]).encode()
        gathered = [json.loads(data) for data in comm.all_gather_bytes(mine)]
        agreed = agreed_on([one[0] for one in gathered], counts)
        differing = {
            own[0] for own in gathered[0][1] if any(own not in theirs for _, theirs in gathered[1:])
        }
        known = {place.name: place for place in (*self._buffers, *self._still)}
        found = []
        for name, shape, dtype, _ in agreed:
            found.append(self._with_shape(known.get(name), name, shape, getattr(torch, dtype)))
        return [*found, *(place for place in self._still if place.name in differing)]

    def _with_shape(
        self, place: Place | None, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Place:
        """A buffer of this rank, which has the shape then; its values do not matter."""
        value = None if place is None else place.value
        if value is not None and (list(value.shape), value.dtype) == (list(shape), dtype):
            assert place is not None
            return place
        made = torch.zeros(list(shape), dtype=dtype, device=device_of(self._module))
        if place is None:
            give_tensors(self._module, {name: made})
            return next(p for p in places_of(self._module) if p.name == name)
        place.owner[place.key] = made
        return place


def agreed_on(lists: Sequence[Sequence[Any]], counts: Sequence[bool]) -> list[Any]:
    """Return what can be averaged of the buffers that ranks have, as `_described` says it.

    Raises:
        ConfigError: a persistent buffer has other shapes on other ranks that count.
    """
    ranks = [rank for rank, count in enumerate(counts) if count]
    by_rank: list[dict[str, Any]] = [{own[0]: own for own in lists[rank]} for rank in ranks]
    agreed: list[Any] = []
    for name in dict.fromkeys(name for own in by_rank for name in own):
        seen: list[Any] = [own.get(name) for own in by_rank]
        if all(one == seen[0] for one in seen):
            agreed.append(seen[0])
        elif any(one is not None and one[3] == "buffer" for one in seen):
            shapes = {
                r: None if own is None else own[1] for r, own in zip(ranks, seen, strict=True)
            }
            raise no_mean(name, shapes)
    return [own for own in agreed if own[1] is not None]


def no_mean(name: str, shapes: Mapping[int, Any]) -> ConfigError:
    """The error about a persistent buffer with these shapes on these ranks."""
    return ConfigError(
        f"buffer {name!r} has other shapes on other workers ({shapes}, by rank), so it has no "
        "mean; give it one shape, or register it with persistent=False, so that each worker has "
        "its own"
    )


def kind_of(value: torch.Tensor | None) -> tuple[list[int] | None, str | None]:
    """Shape and dtype of what may be None, as JSON values."""
    dtype = None if value is None else str(value.dtype).removeprefix("torch.")
    return shape_of(value), dtype


def _described(place: Place) -> list[Any]:
    value = place.value
    dtype = None if value is None else str(value.dtype).removeprefix("torch.")
    return [place.name, shape_of(value), dtype, place.kind]


def _is_summed(value: torch.Tensor | None) -> bool:
    """True if ranks can exchange it; sparse and quantized tensors stay as they are."""
    if value is None:
        return True
    is_plain = value.layout is torch.strided and not value.is_quantized
    return is_plain and not value.is_meta and not _is_wrapper(value)


def _is_wrapper(value: Any) -> bool:
    """True for a tensor that has others inside, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(value))
