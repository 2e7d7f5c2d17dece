"""Look whether everything is there that training needs, where spark-submit has started this."""

from __future__ import annotations

import sys

from sparkdl.cli.doctor_command import DOCTOR

if __name__ == "__main__":
    sys.exit(DOCTOR.run_script())
