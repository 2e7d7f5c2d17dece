"""A terminal for programs."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios


def on_terminal(program: str, *, columns: int) -> str:
    """All that a Python program writes to a terminal, stderr and stdout; it must succeed."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", program]
    environ = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    found = b""
    try:
        while part := os.read(ours, 65536):
            found += part
    except OSError:  # Linux says so when the last writer has gone
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0, found.decode()
    return found.decode()
