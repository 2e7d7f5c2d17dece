"""Look whether everything is there that training needs, where spark-submit has started this."""

from __future__ import annotations

import sys

from sparkdl.cli.command_line import run
from sparkdl.cli.doctor_command import doctor

if __name__ == "__main__":
    sys.exit(run(doctor))
