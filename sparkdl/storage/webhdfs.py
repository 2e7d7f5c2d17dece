"""Time-outs and errors of WebHDFS, both of which fsspec leaves out.

fsspec's client sets no time-out, and takes what a data node answers for the file's content even
where that is an error message.
"""

from __future__ import annotations

from typing import Any

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 60.0


def bound(files: Any) -> None:
    """Give fsspec's WebHDFS time-outs, and have it raise what data nodes refuse."""
    from requests.adapters import HTTPAdapter

    class Bounded(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            options["timeout"] = (_CONNECT_SECONDS, _READ_SECONDS)
            answer: Any = super().send(request, *args, **options)
            if "op=OPEN" in request.url and answer.status_code >= 400:
                raise OSError(f"WebHDFS refused with status {answer.status_code}")
            return answer

    for scheme in ("http://", "https://"):
        files.session.mount(scheme, Bounded())
