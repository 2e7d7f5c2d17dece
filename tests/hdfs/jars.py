"""The jars of a real HDFS, fetched once by pip and apt.

The last pyspark with Hadoop 2.7 carries the classes of name node and data node; the name node's
web server, which answers WebHDFS, also needs the old Jersey 1, which Debian packages. Nothing is
installed: the jars are unpacked into a cache outside the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

CACHE = "SPARKDL_TEST_CACHE"
"""Environment variable that names the folder for what tests fetch."""
SKIP = "leave these tests out with 'make test HDFS=skip'"

_PYSPARK = "pyspark==2.4.8"
_PACKAGES = (
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjsr311-api-java",
)
# Other jars of the same folder, Jersey 2 above all, must not come onto the daemons' class path.
_NEEDED = (
    "hadoop-annotations", "hadoop-auth", "hadoop-common", "hadoop-hdfs", "jetty-6", "jetty-util-6",
    "javax.servlet-api", "jsp-api", "jaxb-api", "guava", "commons-cli", "commons-codec",
    "commons-collections", "commons-configuration", "commons-io", "commons-lang-2",
    "commons-logging", "htrace-core", "protobuf-java", "netty-3", "netty-all", "jackson-core-asl",
    "jackson-mapper-asl", "log4j-1", "slf4j-api", "slf4j-log4j12", "xercesImpl", "leveldbjni-all",
    "activation", "httpclient", "httpcore",
)  # fmt: skip
_FETCH_SECONDS = 600


class CannotFetch(RuntimeError):
    """pip or apt does not give the packages; says how to do without."""


def skip_if_told() -> None:
    """Leave out the test that needs the jars, if ``HDFS=skip`` says so."""
    if os.environ.get("HDFS") == "skip":
        pytest.skip("left out, as HDFS=skip says")


def cached_jars() -> list[Path]:
    """The jars, fetched if this is the first time.

    Raises:
        CannotFetch: the packages cannot be fetched.
    """
    base = os.environ.get(CACHE) or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base).absolute() / "sparkdl-tests" / "hadoop-2.7"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as work:
            (whole := Path(work) / "jars").mkdir()
            _from_pip(Path(work), whole)
            _from_apt(Path(work), whole)
            try:
                whole.rename(folder)  # so that a fetch that was broken off leaves no half
            except OSError:
                if not folder.is_dir():  # unless another run was quicker
                    raise
    return sorted(folder.glob("*.jar"))


def _from_pip(work: Path, target: Path) -> None:
    # Without build isolation: what pip would build with today no longer suits this old setup.py.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--no-build-isolation", "--dest", str(work), _PYSPARK]  # fmt: skip
    _run(command, work)
    with tarfile.open(next(work.glob("pyspark-*.tar.gz"))) as archive:
        for member in archive:
            name = Path(member.name).name
            if "/deps/jars/" in member.name and name.startswith(_NEEDED):
                content = archive.extractfile(member)
                assert content is not None, f"{member.name} is not a file"
                (target / name).write_bytes(content.read())


def _from_apt(work: Path, target: Path) -> None:
    command = ["apt-get", "download", *_PACKAGES]
    try:
        _run(command, work)
    except CannotFetch:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update"], work)  # a fresh machine has no lists of packages
        _run(command, work)
    for package in work.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(work / "root")], work)
    for jar in (work / "root" / "usr" / "share" / "java").glob("*-1.*.jar"):
        (target / jar.name).write_bytes(jar.read_bytes())  # follows links


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=_FETCH_SECONDS
        )
    except FileNotFoundError as error:
        raise CannotFetch(f"{command[0]} is not installed; {SKIP}") from error
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout).strip().splitlines()[-3:]
        raise CannotFetch(f"'{' '.join(command)}' failed: {' / '.join(words)}; {SKIP}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotFetch(f"'{' '.join(command)}' took over {_FETCH_SECONDS} s; {SKIP}") from error
