"""Checks of this machine, as a Spark driver. They work without Spark, which may not be there."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import sparkdl
from sparkdl.cli.doctor.finding import Finding, bounded, left_out, note, ok, wrong
from sparkdl.errors import ClusterError
from sparkdl.runtime.versions import TESTED, distance, installed, numbers

_DISTRIBUTION = "sparkdl-torch"
_WORKERS = "PYSPARK_PYTHON"
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
UNSET_REMEDY = (
    "each new Python worker compiles all of torch again, which takes seconds of CPU; unset it here "
    "and on the executors"
)
"""Remedy for `NO_BYTECODE`."""
_JAVA = 17
_PROGRAM_SECONDS = 20.0
"""Longest wait for a program that tells its version."""
_NAME_SECONDS = 10.0
"""Longest wait for a name server."""


def examine_machine(environ: Mapping[str, str], *, is_remote: bool = False) -> Iterator[Finding]:
    """Look at this machine; with ``is_remote`` it is a client of Spark Connect."""
    said = distance("python", platform.python_version())
    text = f"{said or platform.python_version()}; {sys.executable}"
    yield note("Python", text) if said else ok("Python", text)
    yield ok("sparkdl", f"{sparkdl.__version__}, {Path(sparkdl.__file__).parent}")
    yield from foreign_package()
    ranges = required_ranges()
    for package in (name for name in TESTED if name != "python"):
        yield package_finding(package, installed(package), ranges.get(package, ""))
    if is_remote:
        for subject in (_WORKERS, "Java"):
            yield left_out(subject, "that of the Spark Connect server counts")
        return
    yield workers_python(environ)
    if environ.get(NO_BYTECODE):
        yield note(NO_BYTECODE, f"is set; {UNSET_REMEDY}")
    yield java(environ)
    if "SPARK_HOME" in environ:
        yield spark_home(Path(environ["SPARK_HOME"]), installed("pyspark"))
    yield host_name(environ)


def required_ranges() -> dict[str, str]:
    """Package -> range of versions, such as ``>=4.1,<4.4``, as this installation declares it."""
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return {}
    found = (re.match(r"([\w.-]+)(?:\[[\w,]+\])?\s*([<>=!~\d.,\s]*)", line) for line in lines)
    return {match[1].lower(): match[2].replace(" ", "") for match in found if match}


def package_finding(package: str, version: str | None, allowed: str) -> Finding:
    """Return the finding on the installed version of a package that training needs."""
    remedy = f'pip install "{package}{allowed}"'
    if version is None:
        return wrong(package, f"is not installed; {remedy}")
    if not is_within(version, allowed):
        return wrong(package, f"{version} is outside the range {allowed}; {remedy}")
    said = distance(package, version)
    return ok(package, version) if said is None else note(package, said)


def is_within(version: str, allowed: str) -> bool:
    """Return True if a version is within bounds of ``>=`` and ``<``; other bounds do not count."""
    bounds = re.findall(r"(>=|<)([\d.]+)", allowed)
    ours = numbers(version)
    return all((ours >= numbers(bound)) == (sign == ">=") for sign, bound in bounds)


def foreign_package() -> Iterator[Finding]:
    """PyPI's ``sparkdl`` elsewhere on the path; beside ours it would have ended the import."""
    try:
        other = metadata.distribution("sparkdl")
    except metadata.PackageNotFoundError:
        return
    yield wrong(
        "sparkdl",
        f"another package of that name, {other.version}, is at {other.locate_file('')}; workers "
        "may import that one: pip uninstall sparkdl, here and on the executors",
    )


def workers_python(environ: Mapping[str, str]) -> Finding:
    """Report which Python Spark's workers run, where they are on this machine."""
    chosen = environ.get("PYSPARK_PYTHON")
    if chosen is None and "PYSPARK_GATEWAY_PORT" in environ:
        return note(
            _WORKERS,
            "not set, so under spark-submit workers run the first python3 of their PATH; see line "
            "'versions', and export PYSPARK_PYTHON if that is another Python",
        )
    if chosen is None:
        return ok(_WORKERS, f"not set, so sparkdl sets it to {sys.executable}")
    found = shutil.which(chosen)
    if found is None:
        return note(
            _WORKERS,
            f"{chosen} is not on this machine; executors must have it, for example by --archives",
        )
    ours = ".".join(platform.python_version_tuple()[:2])
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    theirs, problem = _output([found, "-c", code])
    if theirs.strip() != ours:
        return wrong(
            _WORKERS,
            f"{chosen} is Python {theirs.strip() or problem}, the driver runs "
            f"{ours}; export PYSPARK_PYTHON={sys.executable}, or unset it",
        )
    return ok(_WORKERS, f"{chosen}, Python {ours}")


def java(environ: Mapping[str, str]) -> Finding:
    """The Java that Spark would take: that of JAVA_HOME, else the first on the PATH."""
    home = environ.get("JAVA_HOME")
    where = f"in JAVA_HOME={home}" if home else "on the PATH"
    program = f"{home}/bin/java" if home else shutil.which("java", path=environ.get("PATH"))
    remedy = (
        f"install Java {_JAVA} or newer, for example with 'apt-get install "
        f"openjdk-{_JAVA}-jre-headless', or set JAVA_HOME to it"
    )
    if program is None or not Path(program).is_file():
        return wrong("Java", f"there is none {where}; {remedy}")
    text, problem = _output([program, "-version"])
    match = re.search(r'version "(\d+)([^"]*)"', text)
    if match is None:
        return wrong(
            "Java", f"{program} does not tell its version ({problem or text.strip()}); {remedy}"
        )
    if int(match[1]) < _JAVA:
        return wrong("Java", f"{program} is version {match[1]}{match[2]}; {remedy}")
    return ok("Java", f"{match[1]}{match[2]}, {program}")


def spark_home(home: Path, pyspark: str | None) -> Finding:
    """Check that SPARK_HOME, which pyspark prefers to its own jars, is of pyspark's version."""
    jars = sorted((home / "jars").glob("spark-core_*.jar"))
    remedy = f"unset SPARK_HOME, or set it to a Spark {pyspark or 'of the version of pyspark'}"
    if not jars:
        return wrong("SPARK_HOME", f"{home} holds no Spark; {remedy}")
    version = jars[0].stem.rpartition("-")[2]
    if pyspark is not None and numbers(version)[:2] != numbers(pyspark)[:2]:
        return wrong("SPARK_HOME", f"{home} is Spark {version}, pyspark is {pyspark}; {remedy}")
    return ok("SPARK_HOME", f"Spark {version}, {home}")


def host_name(environ: Mapping[str, str]) -> Finding:
    """Check that this host's name leads to an address; else Spark does not start."""
    name = socket.gethostname()
    if "SPARK_LOCAL_IP" in environ:
        return ok("host", f"{name}; Spark uses SPARK_LOCAL_IP={environ['SPARK_LOCAL_IP']}")
    remedy = f"write {name} into /etc/hosts, or set SPARK_LOCAL_IP to an address of this machine"
    try:
        address = bounded(lambda: socket.gethostbyname(name), _NAME_SECONDS, "a name server")
    except (OSError, ClusterError) as error:
        return wrong("host", f"the name {name} leads to no address ({error}); {remedy}")
    return ok("host", f"{name}, {address}")


def _output(command: list[str]) -> tuple[str, str]:
    """Return what a program prints, and the reason if it fails, else an empty text."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout + done.stderr, "" if done.returncode == 0 else f"exit {done.returncode}"
