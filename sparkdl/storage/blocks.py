"""The hosts that hold the blocks of files, as Hadoop's name node tells it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.storage.hadoop_storage import java_errors, knows_scheme
from sparkdl.storage.storage import open_url, scheme_of, without_password

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

Host = tuple[str, ...]
"""The names of a host, its address among them."""
_AT_ONCE = 16
_LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class FileBlock:
    """A range of the bytes of a file."""

    start: int
    stop: int
    hosts: tuple[Host, ...]
    """Hosts that have it on their disks."""


Blocks = Mapping[str, Sequence[FileBlock]]
"""Path of a file in its file system -> its blocks. A file that is not named may lie anywhere."""
Locate = Callable[[str, tuple[str, ...]], Blocks]
"""Given a URL, and the paths of files under it: where their blocks lie."""


def nowhere(url: str, paths: tuple[str, ...]) -> Blocks:
    """See `Locate`: of no file it is known."""
    return {}


def locate_blocks(spark: SparkSession, url: str, paths: tuple[str, ...]) -> Blocks:
    """Return the places of the blocks of files on HDFS and what Hadoop knows as such; see `Locate`.

    A URL of WebHDFS is asked itself, any other one the session's JVM, so not from a client of
    Spark Connect. Nothing is known of local files, of object stores and of an HDFS of one host,
    and nothing where the question fails, of which the user is told: training can do without.
    """
    scheme = scheme_of(url)
    try:
        if scheme == "webhdfs":
            found = _ask_web(url, paths)
        elif scheme in (None, "file") or not hasattr(spark, "_jsparkSession"):
            return {}
        elif knows_scheme(spark, str(scheme)):
            found = _ask_hadoop(spark, url, paths)
        else:
            return {}
    except (OSError, ValueError, RuntimeError) as error:  # fsspec raises what the server names
        logger.warning(
            "the hosts of the blocks of %s are not known (%s): workers read from any host",
            without_password(url),
            without_password(str(error)),
        )
        return {}
    return {path: blocks for path, blocks in found.items() if any(b.hosts for b in blocks)}


def _ask_web(url: str, paths: Sequence[str]) -> Blocks:
    files, _ = open_url(url)

    def ask(path: str) -> list[FileBlock]:
        # Newer servers have a public GETFILEBLOCKLOCATIONS too; all since Hadoop 2 have this one.
        told = files._call("GET_BLOCK_LOCATIONS", path=path).json()["LocatedBlocks"]
        return [
            FileBlock(
                block["startOffset"],
                block["startOffset"] + block["block"]["numBytes"],
                _known((node["hostName"], node["ipAddr"]) for node in block["locations"]),
            )
            for block in told["locatedBlocks"]
        ]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(paths, pool.map(ask, paths), strict=True))


def _ask_hadoop(spark: SparkSession, url: str, paths: Sequence[str]) -> Blocks:
    session: Any = spark
    jvm, wanted = session._jvm, set(paths)
    # One call gives all blocks of a file; one for each of their values takes three times as long.
    to_json = jvm.com.fasterxml.jackson.databind.ObjectMapper().writeValueAsString
    found: dict[str, list[FileBlock]] = {}
    with java_errors():
        root = jvm.org.apache.hadoop.fs.Path(url)
        files = root.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        listed = files.listFiles(root, True)
        while listed.hasNext():
            status = listed.next()
            path = str(status.getPath().toUri().getPath())
            if path not in wanted:
                continue
            found[path] = [
                FileBlock(
                    block["offset"],
                    block["offset"] + block["length"],
                    _known(zip(block["hosts"], map(_address, block["names"]), strict=False)),
                )
                for block in json.loads(to_json(status.getBlockLocations()))
            ]
            if not any(block.hosts for block in found[path]):
                return {}  # an object store: there is no need to ask for the other files
    return found


def _address(name: str) -> str:
    """Return the address in ``address:port``; an IPv6 address is in brackets."""
    return name.rpartition(":")[0].strip("[]")


def _known(hosts: Iterable[tuple[str, str]]) -> tuple[Host, ...]:
    """Hosts by name and address; without those that every host takes for itself."""
    return tuple(
        tuple(dict.fromkeys(names))
        for names in hosts
        if not any(name.startswith(_LOOPBACK) for name in names)
    )
