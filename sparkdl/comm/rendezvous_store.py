"""A store of torch.distributed that keeps its keys on the channel.

A `torch.distributed.Store` in Python: gloo and NCCL exchange their addresses through it, so no
further port is opened and nothing but the run's secret lets a process join.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch does not export it

from sparkdl.comm.channel import ChannelClient
from sparkdl.errors import CommunicationError


class ChannelStore(Store):
    """Keys of one attempt, kept by the channel's server.

    Keep a strong reference while the process group lives: torch holds only a weak one.
    """

    def __init__(self, client: ChannelClient, *, timeout_seconds: float) -> None:
        super().__init__()
        self._client = client
        self._seconds = timeout_seconds

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._client.set(f"store/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        value = self._client.get(f"store/{key}")
        if value is None:
            raise CommunicationError(f"rendezvous key {key} vanished")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; raises torch's error type after the time-out."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        try:
            self._client.wait([f"store/{key}" for key in keys], seconds)
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._client.add(f"store/{key}", amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(self._client.get(f"store/{key}") is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._client.delete(f"store/{key}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the longest wait."""
        self._seconds = timeout.total_seconds()
