"""Look whether everything is there that training needs, where spark-submit has started this."""

from __future__ import annotations

import sys

from sparkdl.cli.doctor.doctor_command import main

if __name__ == "__main__":
    sys.exit(main())
