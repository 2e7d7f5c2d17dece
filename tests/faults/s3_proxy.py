"""A proxy before an S3 server that fails chosen requests: answers 503, breaks off, or is silent."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP = {"connection", "expect", "transfer-encoding", "content-length"}
_STALL_SECONDS = 4.0
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class Proxy:
    """Passes requests on and counts them; ``fail`` says which are not passed on."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.url = ""
        self._lock = threading.Lock()
        self._failing = range(0)
        self._kind = ""
        self.count = 0

    def fail(self, kind: str, requests: range) -> None:
        """From now on requests count from 1, and these fail: ``503``, ``reset`` or ``stall``."""
        with self._lock:
            self._kind, self._failing, self.count = kind, requests, 0

    def fate(self) -> str:
        """How the request that comes now fails; empty: it does not."""
        with self._lock:
            self.count += 1
            return self._kind if self.count in self._failing else ""


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
            fate = proxy.fate()
            if fate == "reset":
                self.close_connection = True
                return
            if fate == "503":
                self.reply(503, {"Content-Type": "application/xml"}, _SLOW_DOWN)
                return
            if fate == "stall":
                time.sleep(_STALL_SECONDS)
            server = http.client.HTTPConnection(proxy.upstream, timeout=20)
            try:
                sent = {n: v for n, v in self.headers.items() if n.lower() not in _HOP}
                sent["Content-Length"] = str(len(body))
                server.request(self.command, self.path, body, sent)
                reply = server.getresponse()
                content = reply.read()
                headers = {n: v for n, v in reply.getheaders() if n.lower() not in _HOP}
                length = reply.headers.get("Content-Length", "0")
            finally:
                server.close()
            self.reply(reply.status, headers, content, length)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def reply(
            self, status: int, headers: dict[str, str], content: bytes, of_head: str = "0"
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            length = of_head if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
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
