"""The shards that a rank holds: those near it, fetched from a peer where they must move.

Every rank tells the others what it can read, and all derive the same assignment from that. A shard
that nobody has here is lost; one that another rank has is sent over the gang's own network, once.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparkdl.comm.communicator import Communicator
from sparkdl.data.plan import Holding, Shard, TrainPlan, assign_near, assign_shards
from sparkdl.data.source import ShardSource
from sparkdl.data.spool.local_disk import (
    disk_errors,
    local_dirs,
    make_private,
    open_private,
    roomiest,
    run_folder,
)
from sparkdl.errors import CommunicationError, ShardLost

_PIECE_BYTES = 8 << 20
_DIFFERENCE = 1.25
"""Speeds that differ by less than this factor may as well be equal: they vary from run to run."""


def hold_shards(
    plan: TrainPlan,
    source: ShardSource,
    comm: Communicator,
    *,
    run_id: str,
    speeds: Mapping[str, float] | None = None,
    work_shares: Mapping[str, float] | None = None,
    say: Callable[[dict[str, Any]], None],
    holding: Holding = "near",
    readers: Sequence[int] | None = None,
) -> TrainPlan:
    """The plan with the shards that each rank holds; this rank's can be opened here. Collective.

    Ranks that train on the same rows hold the same shards, and the plan has one rank for them.

    Args:
        plan: of any assignment.
        source: opens the shards.
        comm: the gang.
        run_id: names the folder of shards that are fetched.
        speeds: rows per second of a worker by its host, where that is known.
        work_shares: relative speeds by patterns of hosts' names, where it is not.
        say: sends an event to the driver: which shards no rank can read, or who holds which.
        holding: how the shards are dealt; "here" looks for none.
        readers: for each rank of the gang, which of the plan's it is; None: these are the same.

    Raises:
        ShardLost: no rank can read some of them.
        CommunicationError: a peer was lost.
        StorageError: the local disk cannot be written.
    """
    if holding == "here":
        return plan
    found = [found_here(shard, source, run_id) for shard in plan.shards]
    names = {comm.address, socket.gethostname(), socket.getfqdn()}
    told: dict[str, Any] = {
        "here": [number for number, shard in enumerate(found) if shard is not None],
        "near": [
            number
            for number, shard in enumerate(found)
            if shard is not None and (not shard.hosts or names & set(shard.hosts))
        ],
    }
    told["speed"] = (speeds or {}).get(socket.gethostname())
    told["wished"] = host_speed(work_shares or {}, names)
    ranks = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(told).encode())]
    here, near = ([set(rank[what]) for rank in ranks] for what in ("here", "near"))
    missing = sorted(set(range(len(plan.shards))).difference(*here))
    if missing:
        if comm.rank == 0:
            say({"kind": "missing", "shards": missing})
        raise ShardLost(f"no worker can read the shards {missing}")
    rows = [shard.num_rows for shard in plan.shards]
    readers = list(readers or range(comm.world_size))
    num_readers = max(readers) + 1
    # near to all ranks of a reader, since each reads its own copy
    near = [
        set.intersection(*(near[rank] for rank, own in enumerate(readers) if own == reader))
        for reader in range(num_readers)
    ]
    if holding == "planned":
        assigned = plan.shards_by_rank
    elif len(rows) == len(near) and not any(shard.hosts for shard in plan.shards):
        # One shard each: bits are those of a run that nothing has disturbed, for a file's way.
        assigned = assign_shards(len(rows), len(near))
    else:
        first = [ranks[readers.index(reader)] for reader in range(num_readers)]
        measured, wished = ([rank[what] for rank in first] for what in ("speed", "wished"))
        assigned = assign_near(rows, near, differing(measured, wished))
    if comm.rank == 0:
        say({"kind": "held", "shards": assigned})
    shards = [shard or planned for shard, planned in zip(found, plan.shards, strict=True)]
    for rank in range(comm.world_size):
        for number in assigned[readers[rank]]:
            if number in here[rank]:
                continue
            peer = min(other for other, has in enumerate(here) if number in has)
            if comm.rank == peer:
                _send(shards[number], comm, rank)
            elif comm.rank == rank:
                shards[number] = _receive(plan.shards[number], comm, peer, run_id)
    return replace(plan.held_by(assigned), shards=tuple(shards))


def host_speed(work_shares: Mapping[str, float], names: Collection[str]) -> float:
    """The relative speed of a host that has these names: of the first pattern that fits, or 1."""
    for pattern, speed in work_shares.items():
        if any(fnmatchcase(name.lower(), pattern.lower()) for name in names):
            return speed
    return 1.0


def differing(measured: Sequence[float | None], wished: Sequence[float]) -> list[float] | None:
    """Speeds by which ranks get rows; None where they hardly differ.

    A rank whose speed was not measured has the one that was wished for, in proportion to others.
    """
    pairs = list(zip(measured, wished, strict=True))
    known = [speed / wish for speed, wish in pairs if speed]
    scale = sum(known) / len(known) if known else 1.0
    speeds = [speed or wish * scale for speed, wish in pairs]
    return speeds if max(speeds) >= _DIFFERENCE * min(speeds) else None


def found_here(shard: Shard, source: ShardSource, run_id: str) -> Shard | None:
    """The shard as it can be opened on this host; None: it cannot."""
    if source.is_here(shard):
        return shard
    for root in local_dirs():
        copy = Path(root) / run_folder(run_id) / _name(shard)
        if copy.is_dir():
            return replace(shard, path=str(copy))
    return None


def _name(shard: Shard) -> str:
    return f"fetched-{shard.shard_id:05d}-{shard.fingerprint}"


def _send(shard: Shard, comm: Communicator, to: int) -> None:
    """Send the files of a shard's spool."""
    files = sorted(path for path in Path(shard.path).iterdir() if path.is_file())
    with disk_errors(Path(shard.path)):
        sizes = [path.stat().st_size for path in files]
    listing = [[path.name, size] for path, size in zip(files, sizes, strict=True)]
    comm.send_bytes(json.dumps(listing).encode(), to)
    for path in files:
        for piece in _pieces(path):
            comm.send_bytes(piece, to)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _receive(shard: Shard, comm: Communicator, peer: int, run_id: str) -> Shard:
    """Write the files that ``peer`` sends of a shard; the folder has its name when it is whole."""
    root = roomiest(local_dirs()) / run_folder(run_id)
    whole, partial = root / _name(shard), root / f"{_name(shard)}.part"
    with disk_errors(root):
        shutil.rmtree(partial, ignore_errors=True)
        make_private(partial)
    for name, size in json.loads(comm.receive_bytes(peer)):
        if Path(name).name != name:
            raise CommunicationError(f"rank {peer} has sent a file of the name {name!r}")
        with disk_errors(root), open(partial / name, "wb", opener=open_private) as file:
            while file.tell() < size:
                file.write(comm.receive_bytes(peer))
    with disk_errors(root):
        partial.rename(whole)
    return replace(shard, path=str(whole))
