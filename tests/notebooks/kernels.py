"""A real kernel whose cells tests run, and whose messages they see while a cell still runs."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests import jvm

SESSION = f"""
import os
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.local.dir", os.path.abspath("local"))
    .config("spark.sql.shuffle.partitions", "2")
    .config(map={jvm.ENTRIES})
    .getOrCreate()
)
from sparkdl.spark.frames import shard_table
shard_table._KILL_SECONDS = {jvm.KILL_SECONDS}
"""


@dataclass
class Cell:
    """What the kernel has said of a cell so far."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    is_over: bool = False

    def outputs(self, mime: str) -> list[str]:
        """Contents of that type, in the order in which they came."""
        data = [message["content"].get("data", {}) for message in self.messages]
        return [one[mime] for one in data if mime in one]

    def streamed(self, name: str = "stdout") -> str:
        """What was printed."""
        contents = [m["content"] for m in self.messages if m["msg_type"] == "stream"]
        return "".join(content["text"] for content in contents if content["name"] == name)

    @property
    def error(self) -> dict[str, Any] | None:
        """Name, text and traceback of the error in which it ended."""
        errors = [m["content"] for m in self.messages if m["msg_type"] == "error"]
        return errors[0] if errors else None


class Kernel:
    """A kernel, and the one cell that it runs now."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager = manager
        self._client = client

    def interrupt(self) -> None:
        """As the front end's stop button does it."""
        self._manager.interrupt_kernel()

    def begin(self, code: str) -> tuple[Cell, str]:
        """Start a cell."""
        return Cell(), self._client.execute(code)

    def follow(self, cell: Cell, name: str, until: Callable[[Cell], bool], seconds: float) -> None:
        """Take messages until something is true, or the cell is over."""
        deadline = time.monotonic() + seconds
        while not (cell.is_over or until(cell)):
            assert time.monotonic() < deadline, f"still waiting after {seconds} s: {cell}"
            with contextlib.suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=0.2)
                if message["parent_header"].get("msg_id") != name:
                    continue
                cell.messages.append(message)
                is_state = message["msg_type"] == "status"
                cell.is_over = is_state and message["content"]["execution_state"] == "idle"

    def run(
        self,
        code: str,
        *,
        until: Callable[[Cell], bool] | None = None,
        then: Callable[[], None] | None = None,
        seconds: float = 180,
    ) -> Cell:
        """Run a cell to its end; once ``until`` is true of it, while it still runs, do ``then``."""
        cell, name = self.begin(code)
        if until is not None:
            self.follow(cell, name, until, seconds)
            assert not cell.is_over, f"the cell was over too early: {cell}"
            assert then is not None
            then()
        self.follow(cell, name, lambda _: False, seconds)
        return cell

    def value(self, code: str) -> str:
        """What a cell prints, which must end well."""
        cell = self.run(code)
        assert cell.error is None, "\n".join(cell.error["traceback"])
        return cell.streamed().strip()


@contextlib.contextmanager
def started_kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel of this Python in ``folder``, which also gets what it says on its console."""
    manager = KernelManager(kernel_name="python3")
    # Below pytest, ipykernel would not show what Spark and its workers print.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["TMPDIR"] = str(folder / "temporary")
    (folder / "temporary").mkdir()
    with (folder / "console.log").open("w") as console:
        manager.start_kernel(cwd=str(folder), env=environment, stdout=console, stderr=console)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
