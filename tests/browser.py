"""A real Chromium with which tests look at a page; a script installs it where it may."""

from __future__ import annotations

import functools
import html
import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parent.parent / ".ci" / "get_chromium.sh"
_OPTIONS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-sandbox",  # which root cannot have, and which pages of our own do not need
)  # fmt: skip


@functools.cache
def _found() -> tuple[str | None, str]:
    done = subprocess.run([_SCRIPT], capture_output=True, text=True, timeout=600)
    return (done.stdout.strip() or None), done.stderr.strip()


def chromium(*arguments: str, dark: bool = False) -> str:
    """Run Chromium with ``arguments``, the last of which is a URL; returns what it prints.

    Skips the test where there is none and none can be installed.
    """
    path, reason = _found()
    if path is None:
        pytest.skip(reason)
    options = [*_OPTIONS, *(["--force-dark-mode"] if dark else [])]
    with tempfile.TemporaryDirectory(prefix="sparkdl-chromium-") as profile:
        done = subprocess.run(
            [path, *options, f"--user-data-dir={profile}", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom(url: str, *, milliseconds: int = 0) -> str:
    """The page as it is after its scripts have run for so long, of the browser's own time."""
    budget = [f"--virtual-time-budget={milliseconds}"] if milliseconds else []
    return chromium(*budget, "--dump-dom", url)


def too_wide(folder: Path, pages: Iterable[str], widths: Iterable[int]) -> list[str]:
    """What makes a reader scroll sideways: page, width in pixels, and the elements that stick out.

    A line for each page of ``folder`` and each width at which the page, or a part of it, is wider
    than what is seen of it. Windows without a screen have a least width, so the pages are shown in
    frames of these widths.
    """
    frames = [[page, width] for page in pages for width in widths]
    served = {f"/{_FRAMES}": _SCRIPT_OF_FRAMES % json.dumps(frames)}

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if (text := served.get(self.path)) is None:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            text = dom(f"http://127.0.0.1:{server.server_port}/{_FRAMES}", milliseconds=600_000)
        finally:
            server.shutdown()
    found = re.search("<pre>(.*?)</pre>", text, re.DOTALL)
    assert found is not None, text
    lines = html.unescape(found[1]).splitlines()
    assert lines.pop() == f"{len(frames)} seen"
    return lines


_FRAMES = "frames-of-all-widths.html"
_SCRIPT_OF_FRAMES = """<!DOCTYPE html><body><script>
(async () => {
  const lines = [], frames = %s;
  for (const [page, width] of frames) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const inside = frame.contentDocument;
    for (const details of inside.querySelectorAll("details")) details.open = true;
    const wide = [...inside.querySelectorAll("*")].filter(part =>
      part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0 &&
      (part === inside.documentElement ||
       ["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(part).overflowX)));
    for (const part of wide)
      lines.push(`${page} ${width}: <${part.localName} class="${part.getAttribute("class")}"> ` +
        `${part.scrollWidth} in ${part.clientWidth}: ${part.textContent.trim().slice(0, 50)}`
        .replace(/\\s+/g, " "));
    frame.remove();
  }
  const shown = document.createElement("pre");
  shown.textContent = [...lines, `${frames.length} seen`].join("\\n");
  document.body.replaceChildren(shown);
})();
</script></body>
"""


def screenshot(url: str, path: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Leave a picture of the page at ``path``."""
    chromium(f"--window-size={width},{height}", f"--screenshot={path}", url, dark=dark)
