"""How are the runs of a directory served to a browser? A list, and each run's page, both live.

The standard library's server, for one person on their own machine. It reads, and nothing else; the
only names that it looks up are those that the directory has.
"""

from __future__ import annotations

import json
import logging
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from sparkdl.errors import SparkDLError
from sparkdl.report.page import body, document
from sparkdl.report.record import RunRecord
from sparkdl.report.store import RunReader
from sparkdl.summary import finite
from sparkdl.ui.pages import LIVE, run_list, script, shell

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class RunServer(ThreadingHTTPServer):
    """Serves what a `RunReader` reads. ``serve_forever`` and ``shutdown`` are the base class's."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], reader: RunReader) -> None:
        """Listen at ``address``; port 0 takes a free one.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        self.reader = reader
        self.reading = threading.Lock()
        self.is_local = address[0] in _LOOPBACK
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host, port = self.server_address[:2]
        shown = str(host)
        return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"

    def records(self) -> list[tuple[str, RunRecord | SparkDLError]]:
        """Folder and record of every run, the newest first; an error where one cannot be read."""
        found: list[tuple[str, RunRecord | SparkDLError]] = []
        with self.reading:
            for name in self.reader.names():
                try:
                    record = self.reader.read(name)
                except SparkDLError as error:
                    found.append((name, error))
                else:
                    if record is not None:
                        found.append((name, record))
        return found

    def record(self, name: str) -> RunRecord | None:
        """The record of one run."""
        with self.reading:
            return self.reader.read(name)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "sparkdl"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        if not self._is_for_us():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "wrong host\n")
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        try:
            self._answer(parts)
        except SparkDLError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")

    do_HEAD = do_GET

    def _answer(self, parts: list[str]) -> None:
        if parts == ["live.js"]:
            self._send(HTTPStatus.OK, "text/javascript", script())
        elif parts in ([], [LIVE]):
            content = run_list(self.server.records())
            self._page("sparkdl runs", content, parts, is_live=True)
        elif len(parts) in (2, 3) and parts[0] == "runs":
            self._run(parts)
        else:
            self._not_found()

    def _run(self, parts: list[str]) -> None:
        record = self.server.record(parts[1])
        if record is None:
            self._not_found()
        elif parts[2:] == ["run.json"]:
            text = json.dumps(finite(record.to_dict()))
            self._send(HTTPStatus.OK, "application/json", text)
        elif parts[2:] in ([], [LIVE]):
            self._page(record.name, body(record), parts, is_live=record.status == "running")
        else:
            self._not_found()

    def _page(self, title: str, content: Any, parts: list[str], *, is_live: bool) -> None:
        """The whole page, or what has changed of it, as the page's script asks for."""
        if parts and parts[-1] == LIVE:
            self._send(HTTPStatus.OK, "text/html", content)
        else:
            inside, head = shell(content, is_live=is_live, is_list=not parts)
            self._send(HTTPStatus.OK, "text/html", document(title, inside, head))

    def _not_found(self) -> None:
        self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such run\n")

    def _is_for_us(self) -> bool:
        """Whether the browser means this machine: other sites may let their names point here."""
        if not self.server.is_local:
            return True
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return host in _LOOPBACK

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Log at DEBUG: a page that is watched asks every two seconds."""
        logger.debug(format, *args)
