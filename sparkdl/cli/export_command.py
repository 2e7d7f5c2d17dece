"""How does a shell turn a saved model into a file for other programs?"""

from __future__ import annotations

import argparse

from sparkdl.cli.command_line import ended

DESCRIPTION = "Write a saved model in another form: ONNX, an exported program, or weights alone."
EXAMPLES = """\
The ending of TARGET chooses the form:
  .onnx          an ONNX file, compared with the model on batches of several sizes
  .pt2           an exported program, for torch.export.load
  .safetensors   the weights alone, by name
  none of these  a folder for sparkdl.load_module, which needs none of the model's own code

Spark is not needed. MODEL and TARGET are paths, or URLs that Python can open.

example:
  sparkdl export models/digits digits.onnx
  sparkdl export s3://models/digits digits.pt2
  sparkdl export models/digits exported/digits
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sparkdl export``."""
    parser.add_argument("model", metavar="MODEL", help="folder of a saved model")
    parser.add_argument("target", metavar="TARGET", help="file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the model; print what was written."""
    return ended(lambda: _export(given.model, given.target, given.overwrite))


def _export(model: str, target: str, overwrite: bool) -> None:
    from sparkdl.serialization.export import export_saved

    exported = export_saved(model, target, overwrite=overwrite)
    print(f"wrote {exported.what}: {target}")
    for line in exported.inputs:
        print(f"  {line}")
    if exported.difference is not None:
        print(f"  largest difference from the model's outputs: {exported.difference:.2g}")
