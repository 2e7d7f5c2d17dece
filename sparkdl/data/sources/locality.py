"""The places of row groups, and the order in which a shard gets those of one host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparkdl.data.sources.parquet_files import Listing, RowGroup
from sparkdl.storage.blocks import Host, Locate

_HOSTS_NAMED = 3
"""Most hosts that are named for a shard."""
_NEARLY_ALL = 0.9
"""Hosts that have this part of what the best one has are as good as that."""


@dataclass(frozen=True)
class Places:
    """The number of bytes of each row group that each host has on its disks."""

    num_bytes: Mapping[tuple[str, int], Mapping[Host, int]]
    """Path and number of a row group -> its bytes on each host; empty: they are not known."""

    @classmethod
    def of(cls, listing: Listing, locate: Locate) -> Places:
        """Find the places of all row groups of the files."""
        blocks = locate(listing.url, tuple(file.path for file in listing.files))
        found: dict[tuple[str, int], Mapping[Host, int]] = {}
        for group in listing.row_groups() if blocks else ():
            start, stop = listing.byte_range(group)
            held: Counter[Host] = Counter()
            for block in blocks.get(group.file.path, ()):
                here = max(0, min(stop, block.stop) - max(start, block.start))
                held.update(dict.fromkeys(block.hosts, here))
            found[group.file.path, group.number] = held
        return cls(found)

    def homes(self, groups: Sequence[RowGroup]) -> list[int]:
        """The number of the host to which each row group belongs.

        That is the one that has it, of several the one with the fewest rows so far. Empty if all
        hosts have everything, or nothing is known.
        """
        holders = [self._holders(group) for group in groups]
        hosts = sorted({host for several in holders for host in several})
        if all(len(several) == len(hosts) for several in holders):
            return []
        rows = dict.fromkeys(hosts, 0)
        homes: dict[int, Host] = {}
        for number in sorted(range(len(groups)), key=lambda n: len(holders[n]) or len(hosts)):
            homes[number] = min(holders[number] or hosts, key=lambda host: rows[host])
            rows[homes[number]] += groups[number].num_rows
        return [hosts.index(homes[number]) for number in range(len(groups))]

    @cached_property
    def _hosts(self) -> set[Host]:
        """All that have something."""
        return {host for several in self.num_bytes.values() for host in several}

    def _holders(self, group: RowGroup) -> list[Host]:
        """The hosts that have about as much of a row group as the one that has most."""
        held = self.num_bytes.get((group.file.path, group.number), {})
        most = max(held.values(), default=0)
        return sorted(host for host, count in held.items() if count > most / 2)

    def hosts_of(self, shares: Sequence[tuple[RowGroup, float]]) -> tuple[str, ...]:
        """The names of the hosts that have most of what is read, best first; see `Shard.hosts`.

        Args:
            shares: row groups, and which part of each is read.
        """
        held: Counter[Host] = Counter()
        for group, share in shares:
            of_group = self.num_bytes.get((group.file.path, group.number), {})
            held.update({host: round(share * count) for host, count in of_group.items()})
        most = max(held.values(), default=0)
        if all(held[host] > _NEARLY_ALL * most for host in self._hosts):
            return ()
        best = sorted(held, key=lambda host: (-held[host], host))[:_HOSTS_NAMED]
        return tuple(name for host in best if held[host] > most / 2 for name in host)
