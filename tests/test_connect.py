from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faces_on_spark_connect(tmp_path: Path) -> None:
    """A process of its own: one process has either a classic session or a Connect session."""
    pytest.importorskip("grpc")
    script = Path(__file__).with_name("connect_faces.py")
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", "from tests.connect_faces import main; import sys; "
         "from pathlib import Path; main(Path(sys.argv[1]))", str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{script.name}\n{done.stdout}\n{done.stderr[-6000:]}"
    for part in ("small module: ok", "large module: ok", "fit: ok"):
        assert part in done.stdout
