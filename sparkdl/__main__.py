"""Runs the command ``sparkdl`` with this Python, as ``python -m sparkdl``."""

from __future__ import annotations

import sys

from sparkdl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
