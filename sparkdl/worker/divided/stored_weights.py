"""The weights of a divided module as files in a storage: each rank of a replica writes some.

A rank gathers one tensor at a time. It has its files on its own disk first, so a storage that fails
for a while holds up no collective, and all ranks write to the storage at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.data.spool.local_disk import ScratchFile
from sparkdl.storage.retried import OUTAGE_SECONDS, again
from sparkdl.storage.sharded_weights import INDEX, file_pieces, index_text, plan_files
from sparkdl.storage.storage import Storage
from sparkdl.sync.strategy import Pipelined


def write_weights(
    module: nn.Module,
    comm: Communicator,
    storage: Storage,
    path: str,
    *,
    num_writers: int,
    pipeline: Pipelined | None = None,
    most_bytes: int | None = None,
) -> None:
    """Write the state dict of a divided module to a folder, see `storage.sharded_weights`.

    Collective: the folder is complete, with its index, when a rank returns.

    Args:
        module: whose state dict has tensors only.
        comm: all ranks.
        storage: where rank 0 sees what others write.
        path: the folder.
        num_writers: the first ranks, which together have all of the module.
        pipeline: whose stages the module has, where there is one.
        most_bytes: of a file; None: `MOST_BYTES`.

    Raises:
        StorageError: the storage, or the own disk, cannot be written.
    """
    from sparkdl.sync.divided.dividing import whole  # brings torch's compiler

    state, ties = _state(module if pipeline is None else pipeline.skeleton)
    gather: Callable[[torch.Tensor], torch.Tensor] = whole
    if pipeline is not None:
        everywhere = pipeline.of_all_ranks(module.state_dict())
        state = {name: everywhere[name] for name in state}
        gather = pipeline.broadcast_by(state)
    sizes = {name: value.numel() * value.element_size() for name, value in state.items()}
    limit = {} if most_bytes is None else {"most_bytes": most_bytes}
    files = plan_files(sizes, num_writers, **limit)
    with contextlib.ExitStack() as stack:
        own: dict[str, ScratchFile] = {}
        if comm.rank < num_writers:
            for number, (file, names) in enumerate(files.items()):
                pieces = file_pieces({name: state[name] for name in names}, ties, gather)
                if number % num_writers == comm.rank:
                    own[file] = stack.enter_context(contextlib.closing(ScratchFile()))
                    own[file].write(pieces)
                else:
                    for _ in pieces:  # gathers what another rank keeps
                        pass
        for file, scratch in own.items():
            _send(storage, f"{path}/{file}", scratch.pieces)
    comm.barrier()
    if comm.rank == 0:
        text = index_text(files, sizes)
        _send(storage, f"{path}/{INDEX}", lambda: iter([text]))
    comm.barrier()


def _send(storage: Storage, path: str, pieces: Callable[[], Iterator[bytes]]) -> None:
    again(lambda: storage.write(path, pieces()), OUTAGE_SECONDS)


def _state(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors by their first names, and the other names of those that have several."""
    registered = {
        name: id(value)
        for named in (module.named_parameters, module.named_buffers)
        for name, value in named(remove_duplicate=False)
    }
    first: dict[int, str] = {}
    state, ties = {}, {}
    for name, value in module.state_dict().items():
        kept = first.setdefault(registered[name], name)
        if kept == name:
            state[name] = value
        else:
            ties[name] = kept
    return state, ties
