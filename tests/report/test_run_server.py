from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkdl.report import run_server
from sparkdl.report.page.report_page import page
from sparkdl.report.record.run_folder import RunFolder, RunReader, folder_name
from sparkdl.report.record.run_record import RunRecord
from sparkdl.report.run_server import RunServer
from sparkdl.storage.storage import LocalStorage
from tests.browser import dom
from tests.report.runs import events, record

ENDED = folder_name("TorchClassifier", "0123456789ab", 1.7e9)
GOING_ON = folder_name("TorchRegressor", "fedcba987654", 1.8e9)


@contextmanager
def serving(folder: Path, reader: RunReader | None = None) -> Iterator[RunServer]:
    server = RunServer(("127.0.0.1", 0), reader or RunReader(LocalStorage(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
    assert not thread.is_alive()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run that has ended, and one that goes on."""
    storage = LocalStorage(tmp_path)
    RunFolder(storage, ENDED).finish(record(), page(record()))
    first, *others = events(ended=False)
    first = {**first, "started": time.time() - 60, "name": "TorchRegressor", "run_name": "<wide>"}
    alive = {"kind": "alive", "at": 60.0, "silence_seconds": 600.0}
    RunFolder(storage, GOING_ON).append([first, *others, alive])
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path


def ask(server: RunServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_list_has_all_runs_the_newest_first(runs: Path) -> None:
    with serving(runs) as server:
        status, text, headers = ask(server, "/")
    assert status == 200
    assert text.index(GOING_ON) < text.index(ENDED)
    assert "1 running, 1 succeeded" in text
    assert "&lt;wide&gt;</a>" in text and "TorchClassifier</a>" in text
    assert "data-live" in text  # new runs may come at any time
    assert "aria-sort" not in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"


def test_the_list_shows_what_models_have_and_why_runs_failed(tmp_path: Path) -> None:
    best = {"epoch": 2, "loss": 0.125, "val_loss": 0.0625}
    last = {"epoch": 3, "loss": 0.75, "val_loss": 0.875}
    ended = RunRecord(
        run_id="1", name="TorchClassifier", started=1.7e9, status="succeeded", kept=best,
        history=[best, last], facts={"epochs": 3},
    )  # fmt: skip
    error = {"type": "DataError", "message": f"<b> is null; {'x' * 200}\nand its trace"}
    failed = RunRecord(run_id="2", name="Other", started=1.8e9, status="failed", error=error)
    for record_ in (ended, failed):
        name = folder_name(record_.name, record_.run_id, record_.started)
        RunFolder(LocalStorage(tmp_path), name).finish(record_, page(record_))
    with serving(tmp_path) as server:
        _, text, _ = ask(server, "/")
    assert "0.125" in text and "loss 0.0625" in text and "0.875" not in text
    assert "3 of 3; kept 2" in text
    assert "DataError: &lt;b&gt; is null; xxx" in text and "x…" in text and "its trace" not in text


def small_run(run_id: str, name: str, started: float, **values: Any) -> RunRecord:
    return RunRecord(run_id=run_id, name=name, started=started, status="succeeded", **values)


@pytest.fixture
def three(tmp_path: Path) -> dict[str, str]:
    """Name -> folder of runs in ``tmp_path``, the oldest first; the last has no loss."""
    params = [{"name": "epochs", "value": "3", "is_set": True}]
    rate = {"name": "learningRate", "is_set": True}
    runs = [
        small_run("a1", "Aa", 1.7e9, seconds=9.0, params=[*params, {**rate, "value": "0.1"}],
                  history=[{"epoch": 1, "loss": 0.25}, {"epoch": 2, "loss": 10.0}]),
        small_run("b2", "Bb", 1.8e9, seconds=80.0, params=[*params, {**rate, "value": "<0.2>"}],
                  history=[{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 9.0}],
                  facts={"workers": 2}),
        small_run("c3", "Cc", 1.9e9, seconds=10.0, facts={"workers": "a damaged number"},
                  error={"type": "DataError", "message": "<Null> rows"}),
    ]  # fmt: skip
    folders = {run.name: folder_name(run.name, run.run_id, run.started) for run in runs}
    for run in runs:
        RunFolder(LocalStorage(tmp_path), folders[run.name]).finish(run, page(run))
    return folders


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", "Cc Bb Aa"), ("sort=run", "Aa Bb Cc"), ("sort=-run", "Cc Bb Aa"),
        ("sort=loss", "Bb Aa Cc"), ("sort=-loss", "Aa Bb Cc"),  # without a loss: at the end
        ("sort=duration", "Aa Cc Bb"), ("sort=started%20(UTC)", "Aa Bb Cc"),
        ("sort=nothing", "Cc Bb Aa"), ("sort=", "Cc Bb Aa"), ("filter=bb", "Bb"),
        ("filter=NULL+data", "Cc"), ("filter=succeeded&sort=run", "Aa Bb Cc"), ("filter=<", "Cc"),
        ("filter=zz", ""), ("sort=workers", "Bb Cc Aa"), ("sort=-workers", "Cc Bb Aa"),
    ],
)  # fmt: skip
def test_the_list_is_sorted_and_filtered(
    tmp_path: Path, three: dict[str, str], query: str, shown: str
) -> None:
    (tmp_path / folder_name("Odd", "d4", 1.6e9)).mkdir()
    (tmp_path / folder_name("Odd", "d4", 1.6e9) / "run.json").write_text("[]")
    with serving(tmp_path) as server:
        status, text, _ = ask(server, f"/?{query}")
    assert status == 200 and "3 succeeded, 1 unreadable" in text
    assert re.findall(r'/">(\w+)</a>', text.replace('href="/">', "")) == shown.split()
    assert ("No run has all of these words" in text) == (not shown)


def test_heads_of_columns_sort_and_keep_the_filter(tmp_path: Path, three: dict[str, str]) -> None:
    with serving(tmp_path) as server:
        text = ask(server, "/?filter=%22b&sort=loss&other=1")[1]
    assert '<th aria-sort="ascending"><a href="/?filter=%22b&amp;sort=-loss">loss</a> ↑' in text
    assert '<th><a href="/?filter=%22b&amp;sort=run">run</a>' in text
    assert 'name="filter" value="&#34;b"' in text and 'name="sort" value="loss"' in text


def test_runs_are_compared_by_what_differs(tmp_path: Path, three: dict[str, str]) -> None:
    with serving(tmp_path) as server:
        status, text, _ = ask(server, f"/compare?run={three['Aa']}&run={three['Bb']}")
        assert status == 200
        assert ask(server, f"/compare?run={three['Aa']}&run=20231114-221320-No-00000000")[0] == 404
        for names in (["Aa"], [], ["Aa", "Aa"]):
            query = "&".join(f"run={three[name]}" for name in names)
            assert ask(server, f"/compare?{query}")[0] == 400
    rows = re.findall(r"<tr><th>([^<]+)</th>(.*?)</tr>", text)
    told = {name: re.findall('"text">(.*?)</td>', cells) for name, cells in rows}
    assert told["learningRate"] == ["0.1", "&lt;0.2&gt;"]
    assert told["loss"] == ["10", "9"] and told["duration"] == ["9.0 s", "1 min 20 s"]
    assert "epochs" not in told and '<p class="hint">1 are the same in all.</p>' in text
    lines = re.findall(r"<title>(\d: loss [\d.]+ at \d)</title>", text)
    assert lines == ["1: loss 0.25 at 1", "1: loss 10 at 2", "2: loss 0.5 at 1", "2: loss 9 at 2"]


def test_a_run_has_a_page_and_json(runs: Path) -> None:
    with serving(runs) as server:
        status, text, _ = ask(server, f"/runs/{ENDED}/")
        assert (status, "Where the time went" in text, "live.js" in text) == (200, True, False)
        status, text, headers = ask(server, f"/runs/{ENDED}/run.json")
        assert headers["Content-Type"].startswith("application/json")
        assert json.loads(text) == json.loads(json.dumps(record().to_dict()))
        _, text, _ = ask(server, f"/runs/{GOING_ON}/")
        assert "live.js" in text and 'http-equiv="refresh"' in text


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt", "/runs/secret.txt", "/runs/../secret.txt", "/runs/%2e%2e/secret.txt",
        "/runs/..%2fsecret.txt/", f"/runs/{ENDED}/../../secret.txt",
        f"/runs/{ENDED}/..%2f..%2fsecret.txt", "/runs//etc/passwd", f"/runs/{ENDED}/run.json/x",
        "/runs/20231114-221320-No-00000000/", "/runs/%00/",
    ],
)  # fmt: skip
def test_nothing_else_is_served(runs: Path, path: str) -> None:
    with serving(runs) as server:
        status, text, _ = ask(server, path)
    assert status == 404
    assert "secret" not in text and "root" not in text


def test_other_sites_names_for_this_machine_are_refused(runs: Path) -> None:
    with serving(runs) as server:
        assert ask(server, "/", Host="evil.example")[0] == 421
        port = server.server_address[1]
        assert ask(server, "/", Host=f"localhost:{port}")[0] == 200


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path) -> None:
    broken = folder_name("Broken", "00000000", 1.75e9)
    (runs / broken).mkdir()
    (runs / broken / "run.json").write_text("{")
    with serving(runs) as server:
        _, text, _ = ask(server, "/")
        assert "is no JSON" in text and ENDED in text
        assert ask(server, f"/runs/{broken}/")[0] == 500


PLACES = ["run.json", "events/000001.jsonl"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "folder", "loop"])
def test_what_is_no_file_costs_its_own_row(runs: Path, kind: str, place: str) -> None:
    """A pipe would be waited for, /dev/zero would fill the memory."""
    odd = folder_name("Odd", "00000000", 1.75e9)
    bad = runs / odd / place
    bad.parent.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        match kind:
            case "pipe":
                os.mkfifo(bad)
            case "socket":
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                stack.enter_context(contextlib.chdir(bad.parent))  # a path of a socket is short
                listener.bind(bad.name)
            case "device":
                bad.symlink_to("/dev/zero")
            case "link to a pipe":
                os.mkfifo(runs / "pipe")
                bad.symlink_to(runs / "pipe")
            case "folder":
                bad.mkdir()
            case "loop":
                bad.symlink_to(bad)
        with serving(runs) as server:
            status, text, _ = ask(server, "/")
            assert status == 200 and ENDED in text and "1 unreadable" in text and odd in text
            assert ask(server, f"/runs/{odd}/")[0] == 500


def test_a_connection_that_is_broken_off_leaves_no_traceback(
    runs: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(runs) as server:
        for _ in range(20):
            with socket.create_connection(server.server_address[:2]) as connection:
                # To close with a linger of 0 resets the connection.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ask(server, "/")[0] == 200
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            server.handle_error(None, ("127.0.0.1", 1))
        for host in ("[", "[::1", "]", "a]b["):
            assert ask(server, "/", Host=host)[0] in (400, 421)
        assert ask(server, "/runs/[")[0] == 404
        assert ask(server, "//[/")[0] in (400, 404)
    assert capfd.readouterr().err == "" and not caplog.records


def test_a_connection_that_says_nothing_is_closed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a thread, and a page that was closed should not keep one."""
    monkeypatch.setattr(run_server._Handler, "timeout", 0.2)
    with serving(runs) as server, socket.create_connection(server.server_address[:2], 10) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""


RUN = {"format": 1, "run_id": "0", "name": "Odd", "started": 1.7e9}
ODD_RECORDS: dict[str, Any] = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "a number": "7",
    "deep": "[" * 100_000,
    "deep and whole": "[" * 3_000 + "]" * 3_000,
    "deep history": json.dumps({**RUN, "history": []})[:-2] + "[" * 900 + "]" * 900 + "]}",
    "large": " " * (1 << 24) + "{}",
    "other format": '{"format": 99}',
    "no name": '{"format": 1, "run_id": "0"}',
    "history of text": json.dumps({**RUN, "history": "none"}),
    "history of numbers": json.dumps({**RUN, "history": [1, 2]}),
    "loss of text": json.dumps({**RUN, "history": [{"loss": "a"}, {"loss": []}]}),
    "restarts of text": json.dumps({**RUN, "attempts": [{"number": "x"}, {"number": 1}]}),
    "no start": json.dumps({**RUN, "started": None}),
    "start beyond all time": json.dumps({**RUN, "started": 1e300}),
    "duration of text": json.dumps({**RUN, "seconds": "long"}),
}


@pytest.mark.parametrize("content", ODD_RECORDS.values(), ids=ODD_RECORDS)
def test_an_odd_record_does_not_hide_the_others(runs: Path, content: str) -> None:
    odd = folder_name("Odd", "00000000", 1.75e9)
    (runs / odd).mkdir()
    (runs / odd / "run.json").write_text(content)
    with serving(runs) as server:
        status, text, _ = ask(server, "/")
        assert status == 200 and ENDED in text
        assert "1 unreadable" in text and odd in text
        status, text, _ = ask(server, f"/runs/{odd}/")
    assert status == 500 and odd in text and "all runs" in text


NODE = {"op": "x", "shape": []}
NODES = [{**NODE, "name": f"n{number}"} for number in range(60)]
LARGE_RECORDS: dict[str, tuple[int, dict[str, Any]]] = {
    "deep layers": (500, {"graph": {"nodes": [*NODES, {**NODE, "name": "." * 9**6}], "edges": []}}),
    "many layers": (500, {"graph": {"nodes": NODES * 2000, "edges": []}}),
    "many edges": (500, {"graph": {"nodes": NODES, "edges": [[0, 1]] * 200_000}}),
    "many classes": (500, {"confusion": {"epoch": 1, "counts": [[1] * 1500] * 1500}}),
    "failures and attempts": (
        200,
        {"failures": [{"at": 9, "reason": ""}] * 100_000,
         "attempts": [{"at": 0, "number": 1, "start_step": None}] * 100_000},
    ),
    "many names": (
        200, {"history": [{"epoch": n, **{f"{n}_{k}": 0 for k in range(99)}} for n in range(300)]}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("status", "values"), LARGE_RECORDS.values(), ids=LARGE_RECORDS)
def test_a_large_record_is_shown_or_refused_in_little_time(
    runs: Path, status: int, values: dict[str, Any]
) -> None:
    """Each of these has less than 16 MiB, and would take the server for hours."""
    odd = folder_name("Odd", "00000000", 1.75e9)
    (runs / odd).mkdir()
    (runs / odd / "run.json").write_text(json.dumps({**RUN, **values}))
    with serving(runs) as server:
        assert ask(server, f"/runs/{odd}/")[0] == status


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "epoch", "at": 1.0},
        {"kind": "epoch", "at": "soon", "record": {}},
        {"kind": "begin", "at": 0.0, "history": "none"},
        {"at": 1.0},
        [],
    ],
)
def test_odd_events_do_not_hide_the_others(runs: Path, event: Any) -> None:
    (runs / GOING_ON / "events" / "000002.jsonl").write_text(json.dumps(event) + "\n")
    with serving(runs) as server:
        for _ in range(2):  # a page asks again and again
            status, text, _ = ask(server, "/")
            assert status == 200 and ENDED in text and "1 unreadable" in text
        status, text, _ = ask(server, f"/runs/{GOING_ON}/")
    assert status == 500 and ("000002.jsonl" in text or "its history is a str" in text)


def test_runs_of_which_little_is_known_are_shown(runs: Path) -> None:
    """Runs in preflight and those of TorchRunner do not know of epochs."""
    early = folder_name("Early", "00000000", 1.75e9)
    begin = {"kind": "begin", "at": 0.0, "run_id": "0", "name": "Early", "started": time.time()}
    alive = {"kind": "alive", "at": 0.0, "silence_seconds": 600.0}
    RunFolder(LocalStorage(runs), early).append([begin, alive])
    function = folder_name("TorchRunner", "00000001", 1.76e9)
    ended = RunRecord(run_id="1", name="TorchRunner", started=1.76e9, status="succeeded")
    RunFolder(LocalStorage(runs), function).finish(ended, page(ended))
    with serving(runs) as server:
        status, text, _ = ask(server, "/")
        assert status == 200
        assert "2 running, 2 succeeded" in text
        for name in (early, function):
            assert ask(server, f"/runs/{name}/")[0] == 200


def test_a_part_that_is_damaged_does_not_hide_the_others(runs: Path) -> None:
    (runs / GOING_ON / "events" / "000002.jsonl").write_text("{\n")
    with serving(runs) as server:
        status, text, _ = ask(server, "/")
    assert status == 200
    assert "unreadable" in text and "succeeded" in text


def test_a_name_that_is_no_utf8_can_be_shown(runs: Path) -> None:
    """As runs have it that an older version wrote."""
    line = {"kind": "log", "at": 60.0, "rank": 0, "level": "WARNING", "line": "caf\udce9"}
    (runs / GOING_ON / "events" / "000002.jsonl").write_text(json.dumps(line) + "\n")
    with serving(runs) as server:
        status, text, _ = ask(server, f"/runs/{GOING_ON}/")
    assert status == 200
    assert "caf?" in text


def test_an_empty_directory_says_what_to_do(tmp_path: Path) -> None:
    with serving(tmp_path / "not made yet") as server:
        assert "reportDir" in ask(server, "/")[1]


class GrowingReader(RunReader):
    """Reads a run that has one more epoch each time it is looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStorage(folder))
        self._writer = RunFolder(LocalStorage(folder), GOING_ON)
        self._writer._num_parts = 1
        self.reads = 0

    def read(self, name: str) -> Any:
        self.reads += 1
        if self.reads > 1:
            loss = {"epoch": 100 + self.reads, "loss": 0.25, "val_gain": 7777.0 + self.reads}
            self._writer.append([{"kind": "epoch", "at": 61.0, "record": loss}])
        return super().read(name)


@pytest.mark.slow
def test_a_browser_shows_a_run_that_goes_on_without_being_asked(runs: Path) -> None:
    reader = GrowingReader(runs)
    with serving(runs, reader) as server:
        text = dom(f"{server.url}runs/{GOING_ON}/", milliseconds=7000)
    assert reader.reads >= 3
    assert "7,77" in text and "val_gain" in text  # which the first answer had not
    assert '<span class="badge running">' in text


@pytest.mark.slow
def test_a_browser_follows_the_list_to_a_report(runs: Path) -> None:
    with serving(runs) as server:
        text = dom(server.url, milliseconds=100)
        assert f'href="/runs/{ENDED}/"' in text
        text = dom(f"{server.url}runs/{ENDED}/", milliseconds=100)
    assert text.count('class="ground"') == 4
    assert "← all runs" in text
