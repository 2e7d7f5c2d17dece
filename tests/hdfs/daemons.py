"""A small real HDFS on one machine: its daemons on the loopback, or on hosts of their own."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

from tests import jvm
from tests.faults.hosts import Host
from tests.ports import free_ports

_HDFS = "org.apache.hadoop.hdfs.server"
_OPENED = (
    "java.lang", "java.lang.reflect", "java.util", "java.util.concurrent", "java.net", "java.io",
    "java.nio", "sun.nio.ch",
)  # fmt: skip
_WEB_XML = '<web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"></web-app>'
_LOG4J = """log4j.rootLogger=INFO,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d{ISO8601} %p %c: %m%n
"""
_LOOPBACK = "127.0.0.1"
_DATA_HTTP_PORT = 50075
"""Of data nodes on hosts of their own."""
METRICS_SECONDS = 5.0
"""How old the numbers that a daemon tells of itself may be."""
_START_SECONDS = 90.0
_STOP_SECONDS = 15.0


class Hdfs:
    """A name node and ``num_data_nodes`` data nodes, as a context manager.

    Args:
        folder: for configuration, data and logs.
        jars: the daemons' class path.
        num_data_nodes: as many copies are kept of each block, if ``replication`` is None.
        replication: copies of each block.
        hosts: for the name node first, then for each data node; none: all are here.
    """

    def __init__(
        self,
        folder: Path,
        jars: list[Path],
        num_data_nodes: int = 2,
        *,
        replication: int | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.num_data_nodes = num_data_nodes
        self._replication = num_data_nodes if replication is None else replication
        names = ["namenode", *(f"datanode{number}" for number in range(num_data_nodes))]
        self._hosts = dict(zip(names, hosts, strict=bool(hosts)))
        self._address = self._hosts["namenode"].address if hosts else _LOOPBACK
        self._folder = folder
        self._jars = jars
        self._java = _java()
        self._port, self._http_port = free_ports(2)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """``hdfs://`` URL of the root."""
        return f"hdfs://{self._address}:{self._port}"

    @property
    def webhdfs_url(self) -> str:
        """``webhdfs://`` URL of the root."""
        return f"webhdfs://{getpass.getuser()}@{self._address}:{self._http_port}"

    @property
    def client_conf(self) -> dict[str, str]:
        """What a Hadoop client needs to know besides the URL."""
        return {"dfs.replication": str(self._replication)}

    def __enter__(self) -> Hdfs:
        try:
            self._format()
            self._launch("namenode", f"{_HDFS}.namenode.NameNode")
            for number in range(self.num_data_nodes):
                self._launch(f"datanode{number}", f"{_HDFS}.datanode.DataNode")
            self._await(lambda addresses: len(addresses) == self.num_data_nodes)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all daemons, by force those that do not heed."""
        for process in reversed(self._running.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_SECONDS)
        self._running.clear()

    def kill_data_node(self, number: int) -> None:
        """End a data node as a power failure would; the name node does not know it at once."""
        process = self._running[f"datanode{number}"]
        process.kill()
        process.wait(_STOP_SECONDS)

    def start_data_node(self, number: int) -> None:
        """Start a data node again, and wait until the name node knows it."""
        before = self._data_nodes()
        self._launch(f"datanode{number}", f"{_HDFS}.datanode.DataNode")
        self._await(lambda addresses: bool(addresses - before))

    def pause_name_node(self, seconds: float) -> None:
        """Have it answer nobody for a while, as in a long collection of garbage."""
        process = self._running["namenode"]
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def restart_name_node(self, seconds: float) -> None:
        """End it, and start it again after a while; returns when it serves."""
        process = self._running["namenode"]
        process.kill()
        process.wait(_STOP_SECONDS)
        time.sleep(seconds)
        self._launch("namenode", f"{_HDFS}.namenode.NameNode")
        self._await(lambda addresses: len(addresses) == self.num_data_nodes)

    def _await(self, is_ready: Callable[[set[str]], bool]) -> None:
        """Wait for what data nodes there are to suit."""
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready(self._data_nodes()):
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended; Hadoop 2.7 was tried with Java 17, which HDFS_JAVA may "
                        f"name. Its last words:\n{self._last_words(name)}"
                    )
            if time.monotonic() > deadline:
                raise RuntimeError(f"no HDFS after {_START_SECONDS} s; see {self._folder}")
            time.sleep(0.2)

    def _data_nodes(self) -> set[str]:
        """Addresses of those that count as alive; none before the name node serves."""
        name = f"{self._address}:{self._http_port}"
        try:
            (bean,) = _beans(name, "Hadoop:service=NameNode,name=NameNodeInfo")
        except (OSError, ValueError):
            return set()
        if bean["Safemode"]:
            return set()
        return {node["xferaddr"] for node in json.loads(bean["LiveNodes"]).values()}

    def _format(self) -> None:
        command = [*self._command("namenode", f"{_HDFS}.namenode.NameNode"),
                   "-format", "-nonInteractive"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the name node could not be formatted:\n{done.stdout[-3000:]}")

    def _launch(self, name: str, main_class: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._command(name, main_class),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the tests, and these in their turn
            )

    def _command(self, name: str, main_class: str) -> list[str]:
        conf = self._folder / f"{name}-conf"
        if not conf.exists():
            self._configure(conf, name)
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        class_path = os.pathsep.join(map(str, [conf, *self._jars]))
        words = [self._java, "-Xmx256m", *jvm.OPTIONS.split(),
                 "-Djava.net.preferIPv4Stack=true", f"-Djava.io.tmpdir={self._folder}",
                 f"-Dhadoop.log.dir={self._folder}", *opened, "-cp", class_path,
                 main_class]  # fmt: skip
        return self._hosts[name].command(words) if self._hosts else words

    def _configure(self, conf: Path, name: str) -> None:
        role = "hdfs" if name == "namenode" else "datanode"
        own = self._hosts.get(name)
        address, http_port = (own.address, _DATA_HTTP_PORT) if own else (_LOOPBACK, 0)
        (conf / "webapps" / role / "WEB-INF").mkdir(parents=True)
        (conf / "webapps" / role / "WEB-INF" / "web.xml").write_text(_WEB_XML, encoding="utf-8")
        (conf / "log4j.properties").write_text(_LOG4J, encoding="utf-8")
        (conf / "hadoop-metrics2.properties").write_text("*.period=1\n", encoding="utf-8")
        _write_site(conf / "core-site.xml", {"fs.defaultFS": self.url,
                                             "hadoop.tmp.dir": self._folder / "tmp"})  # fmt: skip
        _write_site(conf / "hdfs-site.xml", {
            "dfs.replication": self._replication,
            "dfs.namenode.fs-limits.min-block-size": 0,
            "dfs.permissions.enabled": "true",
            "dfs.webhdfs.enabled": "true",
            "dfs.namenode.name.dir": f"file://{self._folder}/name",
            "dfs.datanode.data.dir": f"file://{self._folder}/{name}-data",
            "dfs.namenode.rpc-address": f"{self._address}:{self._port}",
            "dfs.namenode.http-address": f"{self._address}:{self._http_port}",
            "dfs.datanode.address": f"{address}:0",
            "dfs.datanode.http.address": f"{address}:{http_port}",
            "dfs.datanode.ipc.address": f"{address}:0",
            "dfs.datanode.hostname": own.name if own else _LOOPBACK,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": 0,
            "dfs.heartbeat.interval": 1,
            # With the heartbeat: a data node that is silent for half a minute counts as dead.
            "dfs.namenode.heartbeat.recheck-interval": 10000,
        })  # fmt: skip

    def _last_words(self, name: str) -> str:
        log = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(log.splitlines()[-30:])


def _write_site(path: Path, entries: dict[str, object]) -> None:
    lines = (
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>"
        for name, value in entries.items()
    )
    path.write_text(f"<configuration>{''.join(lines)}</configuration>", encoding="utf-8")


def _java() -> str:
    """The Java to run the daemons: HDFS_JAVA, or the one that Spark takes."""
    home = os.environ.get("JAVA_HOME")
    named = os.environ.get("HDFS_JAVA") or (f"{home}/bin/java" if home else "java")
    java = shutil.which(named)
    if java is None:
        raise RuntimeError(f"{named} is not an executable; name a Java with HDFS_JAVA")
    return java


def _beans(address: str, query: str) -> list[dict[str, Any]]:
    """What a daemon says of itself."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/jmx?qry={query}", timeout=5) as answer:
        found: list[dict[str, Any]] = json.load(answer)["beans"]
    return found


def bytes_read(host: str) -> int:
    """Bytes of blocks that the data node on a host of its own had read `METRICS_SECONDS` ago."""
    query = "Hadoop:service=DataNode,name=DataNodeActivity*"
    (bean,) = _beans(f"{host}:{_DATA_HTTP_PORT}", query)
    return int(bean["BytesRead"])
