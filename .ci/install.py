"""Installs packages into the environment of the Python that runs this, with uv or else with pip.

    .venv/bin/python .ci/install.py -r requirements.lock

The arguments are those of ``pip install``. uv is several times as fast. It is fetched with pip, in
the version of requirements-dev.lock. It does not read pip's settings, so it gets them as options:
both take the same files from the same places. Where that is not possible, or uv fails, pip does
the work.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip"]

# Setting of pip -> option of uv, which is given once for each word of the setting's value.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "cert": "--cert",
    "constraint": "--constraints",
}
# Settings that do not change what is installed, or that uv needs no option for.
WITHOUT_EFFECT = {
    "break-system-packages", "cache-dir", "compile", "config-file", "default-timeout",
    "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile", "no-input",
    "no-python-version-warning", "prefer-binary", "progress-bar", "quiet", "require-virtualenv",
    "retries", "root-user-action", "timeout", "verbose",
}  # fmt: skip

# pyspark is published as source only. Its wheel is unpacked as soon as it is built, so the 450 MB
# are not compressed in between; that takes longer than all the rest.
NOT_COMPRESSED = ["--config-settings-package", "pyspark:--build-option=--compression=stored"]


def settings_of(listed: str) -> dict[str, str]:
    """Name and value of the settings for ``pip install``, from what ``pip config list`` prints.

    A variable of the environment counts more than the section ``install`` of a file, and this one
    more than ``global``.
    """
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """The options that make uv look where pip looks.

    Raises:
        ValueError: a setting has no counterpart.
    """
    options = ["--index-strategy", "unsafe-best-match"]  # pip prefers no index to another one
    for name, value in settings.items():
        if name in OPTIONS:
            for word in value.split():
                options += [OPTIONS[name], word]
        elif name not in WITHOUT_EFFECT:
            raise ValueError(f"uv has no counterpart of pip's setting {name!r}")
    return options


def install_with_uv(arguments: Sequence[str]) -> None:
    """Fetch uv if it is not there, and run it.

    Raises:
        ValueError: pip has a setting that uv does not know.
        OSError: uv cannot be started.
        CalledProcessError: pip could not fetch uv, or uv failed.
    """
    listed = subprocess.run([*PIP, "config", "list"], check=True, stdout=subprocess.PIPE, text=True)
    options = uv_options(settings_of(listed.stdout))
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        lock = ROOT / "requirements-dev.lock"
        fetch = ["install", "--quiet", "--disable-pip-version-check", "--constraint", str(lock)]
        subprocess.run([*PIP, *fetch, "uv"], check=True)
    command = [str(uv), "pip", "install", "--quiet", "--python", sys.executable]
    command += [*options, *NOT_COMPRESSED, *arguments]
    # First what is asked for, then what that needs beyond it, such as torch's CUDA packages, which
    # no lock names. At once, uv would build pyspark only to learn what it needs.
    if "--no-deps" not in arguments:
        subprocess.run([*command, "--no-deps"], check=True)
    subprocess.run(command, check=True)


def install_with_pip(arguments: Sequence[str]) -> int:
    """Run pip, which compiles nothing beforehand either; its exit status."""
    fixed = ["install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    return subprocess.run([*PIP, *fixed, *arguments]).returncode


def main(arguments: Sequence[str]) -> int:
    """Install; the exit status."""
    if os.environ.get("INSTALLER") == "pip":
        return install_with_pip(arguments)
    try:
        install_with_uv(arguments)
    except subprocess.CalledProcessError as error:
        reason = f"{Path(error.cmd[0]).name} ended with status {error.returncode}"
    except (ValueError, OSError) as error:
        reason = str(error)
    else:
        return 0
    print(f"installing with pip, since {reason}", file=sys.stderr)
    return install_with_pip(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
