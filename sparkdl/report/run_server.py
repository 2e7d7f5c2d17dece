"""A server that shows the runs of a directory in a browser: a list, and each run's page, both live.

It reads, and nothing else; the only names that it looks up are those that the directory has.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from markupsafe import Markup

from sparkdl.errors import SparkDLError
from sparkdl.report.page.render import render
from sparkdl.report.page.report_page import body, document
from sparkdl.report.page.run_list import comparison, run_list, showing
from sparkdl.report.record.run_folder import RunReader
from sparkdl.report.record.run_record import RunRecord
from sparkdl.runtime.json_values import finite

logger = logging.getLogger(__name__)

_SCRIPT = resources.files(__package__).joinpath("live.js").read_text(encoding="utf-8")
_MOST_COMPARED = 3
"""Runs: curves have six colours, and a run has up to two in a drawing."""
_BACK = Markup('<p><a href="/">← all runs</a></p>')
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


class RunServer(ThreadingHTTPServer):
    """Serves what a `RunReader` reads. ``serve_forever`` and ``shutdown`` are the base class's."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], reader: RunReader) -> None:
        """Listen at ``address``; port 0 takes a free one; raises OSError where it cannot."""
        self.reader = reader
        self.reading = threading.Lock()
        self.is_local = address[0] in _LOOPBACK
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        host, port = self.server_address[:2]
        shown = str(host)
        return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"

    def records(self) -> list[tuple[str, RunRecord | SparkDLError]]:
        """Folder and record of every run, the newest first; an error where one cannot be read."""
        found: list[tuple[str, RunRecord | SparkDLError | None]] = []
        with self.reading:
            for name in self.reader.names():
                try:
                    found.append((name, self.reader.outline(name)))
                except SparkDLError as error:
                    found.append((name, error))
        return [(name, record) for name, record in found if record is not None]

    def record(self, name: str) -> RunRecord | None:
        """The record of one run."""
        with self.reading:
            return self.reader.read(name)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what has ended a connection: at DEBUG if the other end has broken it off."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            logger.debug("the connection of %s was broken off: %s", client_address, error)
        else:
            logger.error("the request of %s failed", client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    timeout = 30
    """Seconds, after which a connection that says nothing is closed."""
    server_version = "sparkdl"
    sys_version = ""

    def do_GET(self) -> None:
        # Whether the browser means this machine: other sites may let their names point here.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.split("/") if part]
            query = parse_qsl(url.query)
        except ValueError:  # "[" begins an address that has no end
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "malformed host or path\n")
            return
        if self.server.is_local and host not in _LOOPBACK:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "wrong host\n")
            return
        try:
            self._answer(parts, query)
        except SparkDLError as error:
            text = render("unreadable.html", text=str(error))
            self._page("unreadable", _BACK + text, HTTPStatus.INTERNAL_SERVER_ERROR)

    do_HEAD = do_GET

    def _answer(self, parts: list[str], query: list[tuple[str, str]]) -> None:
        match parts:
            case []:
                content = run_list(self.server.records(), dict(query))
                self._page("sparkdl runs", content, is_live=True)
            case ["live.js"]:
                self._send(HTTPStatus.OK, "text/javascript", _SCRIPT)
            case ["compare"]:
                self._compare(list(dict.fromkeys(text for name, text in query if name == "run")))
            case ["runs", name] if record := self.server.record(name):
                with showing(name):
                    content = _BACK + body(record)
                self._page(record.title, content, is_live=record.status == "running")
            case ["runs", name, "run.json"] if record := self.server.record(name):
                with showing(name):
                    text = json.dumps(finite(record.to_dict()))
                self._send(HTTPStatus.OK, "application/json", text)
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such run\n")

    def _compare(self, names: list[str]) -> None:
        if not 2 <= len(names) <= _MOST_COMPARED:
            text = f"choose from 2 to {_MOST_COMPARED} runs in the list; {len(names)} were chosen\n"
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", text)
            return
        found = {name: self.server.record(name) for name in names}
        runs = {name: record for name, record in found.items() if record is not None}
        if len(runs) < len(found):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such run\n")
            return
        with showing(", ".join(runs)):
            content = _BACK + comparison(runs)
        self._page("comparison", content)

    def _page(
        self,
        title: str,
        content: Markup,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        is_live: bool = False,
    ) -> None:
        self._send(status, "text/html", document(title, content, is_live=is_live))

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
