"""One rank's stages at work: parts of a batch go through them by torch's own schedules.

Each stage runs the module's own ``forward``. Layers of other stages give values without contents;
where a stage begins, what has come from the stage before takes their place, and where it ends, the
forward pass is left.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from sparkdl.comm.communicator import Communicator, ProcessGroupCommunicator, counting_anew
from sparkdl.data.batches import Batch
from sparkdl.data.collate import Arguments, narrow
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.stages import Sent, Skeleton, Stages, cut_layers, plain_attention
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.sync.strategy import Autocast

MakeLoss = Callable[[Any, Batch], torch.Tensor]
"""Gets what the module returns for some rows, and these; gives what is differentiated."""
See = Callable[[Any, Batch], None]

_KEPT_SCHEDULES = 4
"""Shapes of batches for which schedules with their buffers are kept."""

_CHANGING = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__")
"""Operations on a tensor that change it, besides those whose name ends in one underscore."""

_MOST_KNOWN = 10_000
"""Results of other stages' layers that are remembered."""


class _StageEnds(BaseException):
    """Leaves the forward pass of a module where a stage ends, with what is sent on."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class Pipeline:
    """This rank's part of a pipeline.

    Attributes:
        stages: what belongs to which stage of all.
        skeleton: a copy of the whole module, whose parameters have no values.
        roots: for each stage of this rank, a module of its layers that computes it.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        comm: Communicator,
        example: Arguments,
    ) -> None:
        """Find the stages of ``module``, which is not changed before `take`.

        Args:
            module: whole, with or without the values of its parameters.
            mesh: of which this is the axis ``pipeline``.
            comm: the ranks along it.
            example: inputs of some rows, where the module computes.

        Raises:
            ConfigError: the module cannot be cut so.
        """
        assert isinstance(comm, ProcessGroupCommunicator)
        self.comm = counting_anew(comm)
        self._group = comm.group
        self._mesh, self._module, self._device = mesh, module, example.values[0].device
        self._shapes_of = Skeleton(module, self._device)
        self.skeleton = self._shapes_of.module
        self._example = example
        self.stages: Stages = self._shapes_of.stages(example, cut_layers(mesh, module))
        self._own = list(range(comm.rank, self.stages.count, comm.world_size))
        self.known = _Known()
        self.roots = [_Stage(self, number) for number in self._own]
        self._present: int | None = None
        self._shapes: list[Sent] = []
        self._schedules: OrderedDict[Any, _Schedule] = OrderedDict()

    @property
    def is_last(self) -> bool:
        """True if this rank has what the module returns."""
        return self.stages.count - 1 in self._own

    @property
    def last_rank(self) -> int:
        """The rank along the pipeline of which `is_last` is true."""
        return (self.stages.count - 1) % self.comm.world_size

    def has(self, name: str) -> bool:
        """True of a parameter that a stage of this rank uses."""
        return self.stages.owners[name] in self._own

    def rank_of(self, name: str) -> int:
        """The rank along the pipeline that has a parameter or a buffer."""
        stage = self.stages.owners.get(name, self.stages.owner_of(name))
        return stage % self.comm.world_size

    def take(self) -> None:
        """Let go of the parameters of other ranks' stages, and compute by stages from now on."""
        fakes = dict(self.skeleton.named_parameters())
        for name, part in self._module.named_modules():
            for own in list(part._parameters):
                path = f"{name}.{own}" if name else own
                if part._parameters[own] is not None and not self.has(self._first_name(path)):
                    del part._parameters[own]
                    setattr(part, own, fakes[self._first_name(path)].detach())
        for name, stage in self.stages.layers.items():
            layer = self._module.get_submodule(name)
            layer.forward = partial(self._forward, layer.forward, name, stage)
        for number, name in enumerate(self.stages.cuts, 1):
            layer = self._module.get_submodule(name)
            layer.register_forward_pre_hook(
                partial(self._at_cut, number), with_kwargs=True, prepend=True
            )

    def _first_name(self, path: str) -> str:
        """The name under which a parameter of several names is listed."""
        if path in self.stages.owners:
            return path
        parameter = self.skeleton.get_parameter(path)
        named = self.skeleton.named_parameters()
        return next(name for name, other in named if other is parameter)

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Inside, layers of this stage compute, and no others."""
        self._present = stage
        try:
            yield
        finally:
            self._present = None

    def _forward(
        self, forward: Callable[..., Any], name: str, stage: int, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward pass of a layer that one stage computes."""
        if stage == self._present:
            return forward(*args, **kwargs)

        def compute() -> Any:
            with torch.no_grad():
                return self.skeleton.get_submodule(name)(*args, **kwargs)

        key: list[Any] = [name, self.skeleton.get_submodule(name).training]
        _describe((args, kwargs), key)
        return self.known.result(tuple(key), compute)

    def _at_cut(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._present not in (number, number - 1):
            return None
        self.known.leave()
        values = pytree.tree_leaves((args, kwargs))
        sent = self._shapes[number - 1]
        if self._present == number - 1:
            found = [values[place] for place in sent.places]
            raise _StageEnds(tuple(map(_as_sent, found, sent.shapes)))
        received = self.roots[self._own.index(number)].received
        for place, value, is_changed in zip(sent.places, received, sent.changed, strict=True):
            values[place] = value.clone() if is_changed else value  # torch refuses it of a leaf
        return pytree.tree_unflatten(values, sent.form)

    def train(self, batch: Batch, make_loss: MakeLoss, autocast: Autocast) -> None:
        """Forward and backward passes of all rows; collective along the pipeline.

        Args:
            batch: the rows, equal on all ranks.
            make_loss: called on the last stage for each part.
            autocast: makes the context of forward passes.
        """
        self._run(batch, make_loss, autocast, is_trained=True)

    def look(self, batch: Batch, see: See, autocast: Autocast) -> None:
        """Forward passes alone; collective. ``see`` gets the outputs on the last stage."""

        def use(output: Any, rows: Batch) -> torch.Tensor:
            see(output, rows)
            return _nothing()

        self._run(batch, use, autocast, is_trained=False)

    def alone(self, arguments: Arguments) -> list[Any]:
        """Compute what each stage of this rank gives; some numbers stand for what it receives."""
        self._shapes_of.follow(self._module)
        self._shapes = self._shapes_of.sent(arguments, self.stages.cuts)
        found = []
        for root in self.roots:
            sent = self._shapes[root.number - 1].shapes if root.number else ()
            root.begin([arguments], nullcontext, lambda output, _: output)
            received = (_numbers(value, self._device) for value in sent)
            with plain_attention():
                found.append(root(*received, part=torch.zeros((), dtype=torch.long)))
            root.end()
        self.known.results.clear()  # training may compute in another dtype
        return found

    def _run(self, batch: Batch, use: MakeLoss, autocast: Autocast, *, is_trained: bool) -> None:
        if batch.num_rows == 0 and self._mesh.num_shards == 1:
            return
        parts = self._mesh.num_micro_batches
        size = -(-max(1, batch.num_rows) // parts)
        arguments = batch.arguments
        if batch.num_rows == 0:  # the others wait for this rank's layers
            arguments = self._zeros(parts)
        elif batch.num_rows < size * parts:
            rows = torch.arange(size * parts, device=self._device).clamp(max=batch.num_rows - 1)
            values = tuple(value.index_select(0, rows) for value in arguments.values)
            arguments = Arguments(values, arguments.names)
        cut = [
            Arguments(
                tuple(narrow(value, n * size, (n + 1) * size) for value in arguments.values),
                arguments.names,
            )
            for n in range(parts)
        ]
        bounds = [min(batch.num_rows, n * size) for n in range(parts + 1)]
        real = [batch.rows(*pair) for pair in pairwise(bounds)]
        self._shapes_of.follow(self._module)
        key = (is_trained, *((value.shape, value.dtype) for value in cut[0].values))
        schedule = self._schedules.get(key)
        if schedule is None:
            with autocast():  # what is sent has the dtype that layers compute in
                shapes = self._shapes_of.sent(cut[0], self.stages.cuts)
            schedule = self._schedules[key] = _Schedule(self, shapes, is_trained=is_trained)
        self._schedules.move_to_end(key)
        if len(self._schedules) > _KEPT_SCHEDULES:
            self._schedules.popitem(last=False)
        self._shapes = schedule.shapes

        def seen(output: Any, number: int) -> torch.Tensor:
            rows = real[number]
            if rows.num_rows:
                return use(_first_rows(output, rows, size), rows)
            values = pytree.tree_leaves(output)
            floating = [value for value in values if value.is_floating_point()]
            return sum((value.sum() for value in floating), _nothing()) * 0.0

        for root in self.roots:
            root.begin(cut, autocast, seen)
        try:
            with plain_attention():
                schedule.step()
        except RuntimeError as error:
            # torch wraps what the module raises
            if error.__cause__ is not None and type(error) is RuntimeError:
                raise error.__cause__ from None
            raise
        finally:
            for root in self.roots:
                root.end()

    def _zeros(self, count: int) -> Arguments:
        rows = torch.zeros(count, dtype=torch.long, device=self._device)
        values = tuple(value.index_select(0, rows) for value in self._example.values)
        return Arguments(values, self._example.names)

    def from_last(self, values: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the rank with the last stage gives, on all ranks; collective."""
        data = json.dumps(values).encode() if self.is_last else None
        found: dict[str, Any] = json.loads(self.comm.broadcast_bytes(data, self.last_rank))
        return found

    def of_all_ranks(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the whole module; what other ranks have is on the meta device."""
        whole = tensors_of(self.skeleton)
        return {
            name: state[name] if name in state else torch.empty_like(value, device="meta")
            for name, value in whole.items()
        }

    def broadcast_by(
        self, state: Mapping[str, torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that gives the whole of a tensor of `of_all_ranks` on the CPU; collective."""
        owners = {id(value): self.rank_of(name) for name, value in state.items()}

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            if owners[id(tensor)] == self.comm.rank:
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found = found.detach().contiguous()
            else:
                found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if found.numel():
                bits = found.view(-1).view(torch.uint8)
                self.comm.broadcast(bits, owners[id(tensor)])
            return found.cpu()

        return whole

    def share_buffers(self) -> None:
        """Give each rank the buffers of other ranks' stages; collective."""
        moving = {id(buffer) for buffer in moving_buffers(self._module)}
        for name, buffer in self._module.named_buffers():
            if id(buffer) in moving and buffer.numel():
                values = buffer.detach().contiguous()
                self.comm.broadcast(values.view(-1).view(torch.uint8), self.rank_of(name))
                if values.data_ptr() != buffer.data_ptr():
                    buffer.detach().copy_(values)


class _Known(TorchFunctionMode):
    """Remembers what comes of values without contents, which is slow to find out.

    Results follow from the shapes of what goes in. They are remembered for layers of other stages,
    and, while it is entered, for single operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, Any] = {}
        self._is_entered = False

    @contextmanager
    def until_left(self) -> Iterator[None]:
        """Watch operations to the end of the block, or until `leave` is called."""
        mode: Any = self
        mode.__enter__()
        self._is_entered = True
        try:
            yield
        finally:
            if self._is_entered:
                self._exit()

    def leave(self) -> None:
        """Watch no more: what follows has contents. Within another mode it goes on watching."""
        current: Callable[[], Any] = _get_current_function_mode
        if self._is_entered and current() is self:
            self._exit()

    def _exit(self) -> None:
        mode: Any = self
        mode.__exit__(None, None, None)
        self._is_entered = False

    def result(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The one that is known by this key, or what is computed."""
        if key in self.results:
            return self.results[key]
        found = compute()
        # Values that follow from the inputs, such as a mask, are others for other rows.
        if all(v is None or isinstance(v, FakeTensor) for v in pytree.tree_leaves(found)):
            if len(self.results) >= _MOST_KNOWN:
                self.results.clear()
            self.results[key] = found
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        key: list[Any] = [func]
        if not _describe((args, kwargs), key):
            return func(*args, **kwargs)
        if name in _CHANGING or (name.endswith("_") and not name.endswith("__")):
            before = args[0].shape, args[0].dtype
            found = func(*args, **kwargs)
            if (args[0].shape, args[0].dtype) != before:
                self.results.clear()  # it was one of them
            return found
        return self.result(tuple(key), partial(func, *args, **kwargs))


class _Stage(nn.Module):
    """A stage as torch's pipeline calls it: with what has come, and the number of the part."""

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        super().__init__()
        self.module = pipeline._module
        self.number = number
        self.received: tuple[torch.Tensor, ...] = ()
        self._at, self._known = pipeline.at, pipeline.known
        self.end()

    def begin(self, parts: Any, autocast: Any, see: Any) -> None:
        self._parts, self._autocast, self._see = parts, autocast, see

    def end(self) -> None:
        self.received, self._parts, self._autocast, self._see = (), None, None, None

    def forward(self, *received: torch.Tensor, part: torch.Tensor) -> Any:
        self.received = received
        number = int(part)
        try:
            before = self._known.until_left() if self.number else nullcontext()
            with self._at(self.number), self._autocast(), before:
                output = self._parts[number].call(self.module)
        except _StageEnds as end:
            return end.values
        finally:
            self.received = ()
        if any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(output)):
            raise ConfigError(
                "Mesh: the last stage returns values of layers before it, or a layer was skipped "
                "with which a stage begins; let the module call these layers each time, and return "
                "what its last layers give"
            )
        return self._see(output, number)


class _Schedule:
    """Torch's schedule for parts of one shape."""

    def __init__(self, pipeline: Pipeline, shapes: list[Sent], *, is_trained: bool) -> None:
        mesh, device = pipeline._mesh, pipeline._device
        self.shapes = shapes
        count = pipeline.stages.count
        edges: list[tuple[torch.Tensor, ...]] = [()]
        for sent in shapes:
            edges.append(
                tuple(
                    torch.empty_like(value, device="meta", requires_grad=value.is_floating_point())
                    for value in sent.shapes
                )
            )
        edges.append((torch.empty((), device="meta"),))
        stages: list[Any] = [
            PipelineStage(
                _Bare(root), root.number, count, device,
                input_args=edges[root.number], output_args=edges[root.number + 1],
                group=pipeline._group,
            )
            for root in pipeline.roots
        ]  # fmt: skip
        loss = _itself if is_trained else None
        parts = mesh.num_micro_batches
        kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
        options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        self._schedule: Any
        if mesh.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(stages, parts, **options)
        else:
            kind = kinds[mesh.schedule] if is_trained else ScheduleGPipe
            self._schedule = kind(stages[0], parts, **options)
        self._numbers = torch.arange(parts)

    def step(self) -> None:
        """One batch."""
        self._schedule.step(part=self._numbers, target=self._numbers, return_outputs=False)


def _itself(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The loss, which the last stage has computed."""
    return loss


def _nothing() -> torch.Tensor:
    return torch.zeros(())


class _Bare(nn.Module):
    """Hides from torch's pipeline that a stage gathers its layers, which it does by itself."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stage(*args, **kwargs)


def _describe(value: Any, key: list[Any]) -> bool:
    """Add what the shapes of results follow from; true if there are values without contents."""
    if isinstance(value, torch.Tensor):
        key += (value.shape, value.dtype)
        return isinstance(value, FakeTensor)
    key.append(type(value))
    if isinstance(value, (tuple, list, dict)):
        key.append(tuple(value) if isinstance(value, dict) else len(value))
        inside = value.values() if isinstance(value, dict) else value
        found = [_describe(one, key) for one in inside]  # of all, also after the first such value
        return any(found)
    key.append(value if isinstance(value, (int, float, str, bool)) else repr(value))
    return False


def _as_sent(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value as the next stage expects it, whatever precision a layer has computed with."""
    if isinstance(value, FakeTensor) or value.shape != like.shape:
        raise ConfigError(
            f"Mesh: a stage gives a value of the shape {tuple(value.shape)}, and on rows of zeros "
            f"it was {tuple(like.shape)}; the module's shapes must follow from those of its inputs"
        )
    return value.to(like.dtype).contiguous()


def _numbers(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Some numbers in the shape of a tensor; equal on all ranks."""
    numbers = torch.arange(like.numel(), dtype=torch.float64).cos().view(like.shape)
    return numbers.to(device, like.dtype)


def _first_rows(output: Any, rows: Batch, size: int) -> Any:
    """The output without those of rows that fill a part up."""
    if rows.num_rows == size:
        return output

    def kept(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0 or len(value) != size:
            raise ConfigError(
                f"Mesh: of {size} rows the module returns a tensor of the shape "
                f"{tuple(value.shape)}; a pipeline fills parts of a batch up with rows that do not "
                "count, so let the module return tensors with a row for each of its input's"
            )
        return value[: rows.num_rows]

    return pytree.tree_map_only(torch.Tensor, kept, output)
