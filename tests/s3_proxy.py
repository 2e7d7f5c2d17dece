"""A proxy before the S3 server that fails chosen requests: 503, a broken connection, silence."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP = {"connection", "expect", "transfer-encoding", "content-length"}
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
NONE = range(0)


class Proxy:
    """Passes requests on and counts them; `fail` says which are not passed on, or late."""

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self.count = 0
        self.requests: list[str] = []
        """Method and path of each that was counted."""
        self.stall_seconds = 3.0
        """How long a request that stalls waits before it is passed on."""
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._failing = NONE
        self._kind = ""

    def fail(self, kind: str, requests: range) -> None:
        """From now on requests count from 1, and these fail: ``503``, ``reset`` or ``stall``."""
        with self._lock:
            self._kind, self._failing, self.count, self.requests = kind, requests, 0, []

    def fate(self, request: str) -> str:
        """How the request that comes now fails; empty: it does not."""
        with self._lock:
            self.count += 1
            self.requests.append(request)
            return self._kind if self.count in self._failing else ""

    def passed_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the server's answer."""
        server = http.client.HTTPConnection(self._upstream, timeout=20)
        try:
            server.request(method, path, body, {**headers, "Content-Length": str(len(body))})
            answer = server.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            server.close()


@contextmanager
def started_proxy(upstream: str) -> Iterator[Proxy]:
    """Start a proxy on the loopback."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True  # the client has gone

        def answer(self) -> None:
            body = self.body()
            fate = proxy.fate(f"{self.command} {self.path}")
            if fate == "reset":
                self.close_connection = True
                return
            if fate == "503":
                self.reply(503, {"Content-Type": "application/xml"}, _SLOW_DOWN)
                return
            if fate == "stall":
                time.sleep(proxy.stall_seconds)
            sent = {name: text for name, text in self.headers.items() if name.lower() not in _HOP}
            self.reply(*proxy.passed_on(self.command, self.path, sent, body))

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_response_only(status)
            for name, text in headers.items():
                if name.lower() not in _HOP:
                    self.send_header(name, text)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join(20)
