"""Run the notebooks and keep what their cells show, without traces of the machine.

    make record-notebooks

What is kept is what a reader sees: text, tables, pictures and the last state of what was drawn
again and again. Folders and hosts get plain names, and what Spark says when it begins is left out.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
STARTING = re.compile(
    r"^(\[IPKernelApp\]|WARNING: Using incubator|Using Spark's default log4j|Setting default log "
    r"level|To adjust logging level|\d\d/\d\d/\d\d [\d:]+ WARN ).*\n?",
    re.MULTILINE,
)


def plain(text: str, names: dict[str, str]) -> str:
    """The text without what only this machine has."""
    text = STARTING.sub("", text)
    for name, instead in names.items():
        text = text.replace(name, instead)
    return text


def kept(outputs: list[Any], names: dict[str, str]) -> list[Any]:
    """Outputs in their order, streams that follow each other as one."""
    found: list[Any] = []
    for output in outputs:
        output.pop("metadata", None)
        output.pop("transient", None)
        if output.output_type == "stream":
            text = plain(output.text, names)
            if found and found[-1].output_type == "stream" and found[-1].name == output.name:
                found[-1].text += text
            elif text:
                found.append(nbformat.v4.new_output("stream", name=output.name, text=text))
            continue
        if "data" in output:
            data = output.data
            data = {k: plain(v, names) if k.startswith("text/") else v for k, v in data.items()}
            if not any(data.values()):  # what was shown has been taken away again
                continue
            more = {"execution_count": None} if output.output_type == "execute_result" else {}
            found.append(nbformat.v4.new_output(output.output_type, data=data, **more))
            continue
        raise RuntimeError(f"a cell has failed: {output}")
    return found


def record(path: Path) -> None:
    """Run one notebook, and write its outputs into it."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        names = {
            os.path.realpath(folder): "~",
            folder: "~",
            tempfile.gettempdir(): "/tmp",
            str(ROOT): "~/sparkdl",
            sys.prefix: "~/sparkdl/.venv",
            socket.gethostname(): "localhost",
        }
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = kept(cell.outputs, names)
    notebook.metadata = {
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    for notebook_path in sorted((ROOT / "notebooks").glob(f"{''.join(sys.argv[1:2])}*.ipynb")):
        record(notebook_path)
        print(notebook_path.name, notebook_path.stat().st_size)
