"""Ports for servers that begin later, in processes of their own."""

from __future__ import annotations

import contextlib
import random
import socket

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below those that systems give to whoever asks for any (Linux from 32,768 on)."""


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody has, nor is given by chance before the server begins."""
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [port] * (port not in found)
    return found
