"""The Spark session of a command."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from urllib.parse import urlsplit

from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.spark.daemon import DAEMON
from sparkdl.spark.session.failures import spark_message

_NEEDED_AT_START = (
    "spark.driver.cores",
    "spark.driver.extraClassPath",
    "spark.driver.extraJavaOptions",
    "spark.driver.extraLibraryPath",
    "spark.driver.memory",
)
"""Read by the JVM when it starts."""
_MASTER = re.compile(r"local|spark://.|k8s://.|sc://.|yarn$")
"""As Spark has it, and what its clients call a Spark Connect server."""
_DEPLOY_MODE = "spark.submit.deployMode"
_CONNECT_SECONDS = 5.0
_NAMED_HOST = re.compile(r"(?:spark|sc|k8s)://(.*)")
_DEFAULT_PORTS = {"spark": 7077, "sc": 15002, "k8s": 443}
_LOG4J = Path(__file__).with_name("log4j2.properties")


def make_session(section: SparkSection, app_name: str) -> SparkSession:
    """The session of a command; raises ConfigError for entries that come too late, or ClusterError.

    Under ``spark-submit`` Python was chosen there; a command started otherwise has workers use the
    Python that it runs on itself, unless ``PYSPARK_PYTHON`` names another.
    """
    master = section.master or ""
    if section.master is not None and not _MASTER.match(master):
        raise ConfigError(
            f"the master {master!r} is none of Spark's: local[2], spark://host:7077, yarn, "
            "k8s://https://host:6443, or sc://host:15002 for Spark Connect"
        )
    _check_entries(section.conf, os.environ, is_remote=master.startswith("sc://"))
    if master.startswith("spark://"):
        require_answer(master)
    if not _is_submitted(os.environ):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        _log_errors_only(os.environ)
    builder = SparkSession.builder.appName(section.app_name or app_name)
    if section.master is not None:
        is_remote = master.startswith("sc://")
        builder = builder.remote(master) if is_remote else builder.master(master)
    # Spark's own bar would be drawn over ours.
    conf: dict[str, object] = {"spark.ui.showConsoleProgress": False}
    if master.startswith("local"):  # whose Python has sparkdl
        conf["spark.python.daemon.module"] = DAEMON
    conf |= section.conf
    for key, value in conf.items():
        builder = builder.config(key, str(value).lower() if isinstance(value, bool) else value)
    from py4j.protocol import Py4JJavaError  # later: where pyspark is missing, it is named

    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise ClusterError(
            "Spark's JVM ended while it started; its own words are above. 'sparkdl doctor' looks "
            "for the cause: Java, its version, SPARK_HOME, the host's name"
        ) from error
    except Py4JJavaError as error:
        said = spark_message(error).partition(" | ")[0]
        given = section.master or SparkConf().get("spark.master")
        raise ClusterError(
            f"Spark does not start on {given or 'the default master'}: {said}; {_remedy(error)}"
        ) from error


def require_answer(master: str) -> None:
    """See that a standalone master listens, for which Spark would try a minute; ClusterError."""
    told = [silence(host, port) for host, port in addresses(master)]
    if told and all(told):
        raise ClusterError(
            f"{told[0]}; check the URL {master}, that the master runs, and that this host may "
            "connect to it"
        )


def silence(host: str, port: int) -> str:
    """Say that nothing answers at an address; empty: something does."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return f"nothing answers at {host}:{port} ({error})"
    return ""


def addresses(master: str) -> list[tuple[str, int]]:
    """Hosts and ports that a master's URL names; none for ``local`` and ``yarn``."""
    match = _NAMED_HOST.fullmatch(master)
    if match is None:
        return []
    default = _DEFAULT_PORTS[master.partition(":")[0]]
    rest = re.sub("^https?://", "", match[1]).partition("/")[0].partition(";")[0]
    parts = (urlsplit(f"//{place}") for place in rest.split(","))
    return [(part.hostname or "", part.port or default) for part in parts]


def _remedy(error: Exception) -> str:
    """Return the remedy for a session that does not start."""
    if "EventLog" in str(error):  # in the stack of the JVM
        return (
            "it cannot write its event log: make the folder that spark.eventLog.dir names, or set "
            "spark.eventLog.enabled=false"
        )
    return "'sparkdl doctor' looks for the cause, such as a master that does not answer"


def _is_submitted(environ: Mapping[str, str]) -> bool:
    """Return True if ``spark-submit`` has started this process, hence the JVM before it."""
    return "PYSPARK_GATEWAY_PORT" in environ


def _log_errors_only(environ: MutableMapping[str, str]) -> None:
    """Have Spark's JVM log as our own file says, where the user has none: without warnings."""
    option = f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}"
    options = environ.get("SPARK_SUBMIT_OPTS", "")
    own = Path(environ.get("SPARK_HOME", "/"), "conf", _LOG4J.name)
    if "SPARK_CONF_DIR" not in environ and "-Dlog4j" not in options and not own.is_file():
        environ["SPARK_SUBMIT_OPTS"] = f"{options} {option}".strip()


def _check_entries(
    conf: Mapping[str, object], environ: Mapping[str, str], *, is_remote: bool
) -> None:
    """Refuse entries that would have no effect any more, and say where they would have one."""
    has_started = is_remote or _is_submitted(environ)
    where = "the Spark Connect server's start" if is_remote else "spark-submit"
    for key in conf:
        if key == _DEPLOY_MODE or (key in _NEEDED_AT_START and has_started):
            place = "spark-submit" if key == _DEPLOY_MODE else where
            raise ConfigError(
                f"{key} is needed before the job file is read; give it to {place}: "
                f"--conf {key}={conf[key]}"
            )
