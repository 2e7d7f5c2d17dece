"""What does ``python -m sparkdl`` do? What the command ``sparkdl`` does, with this Python."""

from __future__ import annotations

import sys

from sparkdl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
