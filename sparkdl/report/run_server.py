"""A server that shows the runs of a directory in a browser: a list, and each run's page, both live.

It reads, and nothing else; the only names that it looks up are those that the directory has.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from sparkdl.errors import SparkDLError, StorageError
from sparkdl.report.page import html
from sparkdl.report.page.html import Markup, joined, number, row, section, tag
from sparkdl.report.page.report_page import badge, body, document
from sparkdl.report.record.run_folder import RunReader
from sparkdl.report.record.run_record import RunRecord, count_of
from sparkdl.runtime.json_values import finite

logger = logging.getLogger(__name__)

_SECONDS = 4
"""After which a browser without scripts loads a page again."""
_SCRIPT = resources.files(__package__).joinpath("live.js").read_text(encoding="utf-8")


def run_list(runs: Sequence[tuple[str, RunRecord | SparkDLError]]) -> Markup:
    """All runs, the newest first."""
    rows = [_row(name, record) for name, record in runs]
    states = [state for state, _ in rows]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    counted = ", ".join(f"{count} {state}" for state, count in counts.items())
    title = joined(tag("header", tag("h1", "Runs")), tag("p", counted, class_="quiet"))
    if not runs:
        hint = "None yet. Set reportDir of an estimator to this directory, and fit."
        return joined(title, tag("section", tag("p", hint)))
    head = row(*_COLUMNS, kind="th")
    table = tag("table", head, *(shown for _, shown in rows), class_="runs rows")
    return joined(title, tag("section", table))


def _row(name: str, record: RunRecord | SparkDLError) -> tuple[str, Markup]:
    if isinstance(record, RunRecord):
        try:
            return record.status, _readable_row(name, record)
        except Exception as error:  # whatever a record with odd values leads to
            record = _odd_values(name, error)
    state = badge("unreadable")
    cells = (tag("td", name), tag("td", state), tag("td", str(record), colspan=8))
    return "unreadable", tag("tr", *cells)


def _odd_values(name: str, error: Exception) -> SparkDLError:
    """What to say of a record that was read, and yet cannot be shown."""
    logger.debug("the record of %s cannot be shown", name, exc_info=error)
    return StorageError(
        f"the record of {name} has values that cannot be shown ({type(error).__name__}: {error}); "
        "remove the folder if nobody needs it"
    )


def _readable_row(name: str, record: RunRecord) -> Markup:
    last: Mapping[str, Any] = record.history[-1] if record.history else {}
    own = record.measured
    link = tag("a", record.title, href=f"/runs/{quote(name)}/")
    facts = record.facts
    epochs = f"{count_of(last) or 0:.4g}"
    if "epochs" in facts:
        epochs += f" of {facts['epochs']}"
    if count_of(own) != count_of(last):
        epochs += f"; kept {count_of(own):.4g}"
    measured = [
        f"{key[4:].replace('_', ' ')} {html.value(value)}"
        for key, value in own.items()
        if key.startswith("val_")
    ]
    values = [
        html.moment(record.started)[: len("2026-01-01 00:00")],
        html.duration(record.seconds),
        epochs,
        html.value(own["loss"]) if "loss" in own else "",
        _sparkline([entry.get("loss") for entry in record.history]),
        ", ".join(measured[:3]),
        str(facts.get("workers", "")),
        str(record.restarts),
    ]
    said = [record.name] if record.run_name else []
    if record.error is not None:
        message = record.error["message"].strip().partition("\n")[0]
        text = f"{record.error['type']}: {message}"
        said.append(text[:_MOST_CHARACTERS] + "…" * (len(text) > _MOST_CHARACTERS))
    what = joined(*(tag("div", text, class_="quiet") for text in said))
    named = ("", "", *_COLUMNS[2:])
    return row(joined(link, what), badge(record.status), *values, names=named)


def _sparkline(values: Sequence[float | None]) -> Markup:
    """The course of a value, as large as a word."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return Markup("")
    low, high = min(value for _, value in known), max(value for _, value in known)
    across, up = 76 / (len(values) - 1), 18 / (high - low) if high > low else 0.0
    places = [f"{number(2 + x * across)} {number(20 - (y - low) * up)}" for x, y in known]
    line = tag("path", d="M" + "L".join(places), class_="line c0")
    return tag("svg", line, viewBox="0 0 80 22", width=80, height=22, role="img")


_MOST_CHARACTERS = 120
"""Of the reason of a failure, in the list."""
_COLUMNS = (
    "run", "status", "started (UTC)", "duration", "epochs", "loss", "", "validation", "workers",
    "restarts",
)  # fmt: skip
_BACK = tag("p", tag("a", "← all runs", href="/"))
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
        """What to open in a browser."""
        host, port = self.server_address[:2]
        shown = str(host)
        return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"

    def records(self) -> list[tuple[str, RunRecord | SparkDLError]]:
        """Folder and record of every run, the newest first; an error where one cannot be read."""
        found: list[tuple[str, RunRecord | SparkDLError | None]] = []
        with self.reading:
            for name in self.reader.names():
                try:
                    found.append((name, self.reader.read(name)))
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
    server_version = "sparkdl"
    sys_version = ""

    def do_GET(self) -> None:
        # Whether the browser means this machine: other sites may let their names point here.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        except ValueError:  # "[" begins an address that has no end
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "malformed host or path\n")
            return
        if self.server.is_local and host not in _LOOPBACK:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "wrong host\n")
            return
        try:
            self._answer(parts)
        except SparkDLError as error:
            text = joined(_BACK, section("Unreadable", tag("p", str(error)), class_="trouble"))
            self._page("unreadable", text, HTTPStatus.INTERNAL_SERVER_ERROR)

    do_HEAD = do_GET

    def _answer(self, parts: list[str]) -> None:
        match parts:
            case []:
                self._page("sparkdl runs", run_list(self.server.records()), is_live=True)
            case ["live.js"]:
                self._send(HTTPStatus.OK, "text/javascript", _SCRIPT)
            case ["runs", name] if record := self.server.record(name):
                try:
                    content = joined(_BACK, body(record))
                except Exception as error:  # whatever a record with odd values leads to
                    raise _odd_values(name, error) from error
                self._page(record.title, content, is_live=record.status == "running")
            case ["runs", name, "run.json"] if record := self.server.record(name):
                try:
                    text = json.dumps(finite(record.to_dict()))
                except Exception as error:  # as above
                    raise _odd_values(name, error) from error
                self._send(HTTPStatus.OK, "application/json", text)
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such run\n")

    def _page(
        self,
        title: str,
        content: Markup,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        is_live: bool = False,
    ) -> None:
        head = None
        if is_live:
            content = tag("div", content, data_live=True)
            # Without scripts the browser loads the page again.
            refresh = tag("meta", http_equiv="refresh", content=str(_SECONDS))
            head = joined(tag("noscript", refresh), tag("script", src="/live.js", defer=True))
        self._send(status, "text/html", document(title, content, head))

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
