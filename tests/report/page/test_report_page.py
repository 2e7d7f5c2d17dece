from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

import sparkdl
from sparkdl.report.page import formats
from sparkdl.report.page.render import render
from sparkdl.report.page.report_page import BANDS, layer_section, page
from sparkdl.report.page.svg import layers_of, line_chart, ticks
from sparkdl.report.page.timeline import MOST_LANES, SPENT_ON, grouped
from sparkdl.report.record.run_record import RunRecord, curve_panels
from sparkdl.train import time_spent
from tests.report.runs import GRAPH, record


class Checker(HTMLParser):
    """Every element that is opened is closed; keeps texts, and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.loads += [value or "" for key, value in attributes if key in ("src", "href")]
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_shows_all_and_loads_nothing() -> None:
    assert type(page(record())) is str  # which can be searched for tags, as Markup cannot
    found = Checker(page(record()))
    text = " ".join(found.texts)
    for title in (
        "Learning curves", "Where the time went", "Updates by layer", "Failures and restarts",
        "Confusion matrix", "Model", "Hardware", "Configuration", "Warnings of the workers",
    ):  # fmt: skip
        assert title in text
    assert "a worker was lost (executor 1 <lost>)" in text
    assert "ranks 2" not in text and "rank 0\u20131" in text  # two machines of two ranks each
    assert "started again after 5.4 s, from step 1,000" in text
    assert not re.search('<[^>]*="[^"]*"[^ \\n/>]', page(record()))  # attributes are apart
    assert found.loads == []
    assert "script" not in found.tags
    assert "url(" not in page(record()) and "@import" not in page(record())


@pytest.mark.parametrize(("epochs", "last", "shown"), [(2, 9, False), (3, 9, True), (2, 10, True)])
def test_an_end_with_other_steps_than_planned_is_not_measured_by_them(
    epochs: int, last: int, shown: bool
) -> None:
    facts = {**record().facts, "epochs": epochs, "first_step": 0, "steps": 10}
    history = [{"epoch": 2, "loss": 1.0}]
    changed = replace(record(), facts=facts, history=history, steps=[[1.0, last, 1.0, None]])
    assert ("of 10 planned" in page(changed)) == shown


def test_tiles_show_what_the_model_has_and_say_what_phases_are() -> None:
    whole = record()
    best = {**whole.history[2], "val_loss": 0.0123}
    texts = Checker(page(replace(whole, kept=best))).texts
    place = texts.index("val_loss")
    last = formats.value(whole.history[-1]["val_loss"])
    assert texts[place + 1 : place + 3] == ["0.0123", f"epoch {best['epoch']:g}; at the end {last}"]
    assert Checker(page(whole)).texts[place + 1] == last
    assert "spool: rows are shuffled and written to local disks" in " ".join(texts)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("is_dark", [False, True])
def test_badges_can_be_read(is_dark: bool) -> None:
    style = page(record()).partition("<style>")[2]
    found = re.findall(r"--([\w-]+): (#\w{6})", style)
    half = next(n for n, (name, _) in enumerate(found) if n and name == "page")
    colours = dict(found[half:] if is_dark else found[:half])
    rules = re.findall(
        r"\.badge[.\w, ]* \{ color: var\(--(\w+)\); background: rgb\((.*?)%\)", style
    )
    assert {name for name, _ in rules} == {"good", "bad", "accent"}
    for (name, ground), behind in product(rules, ("card", "page")):
        red, green, blue, percent = (int(word) for word in re.findall(r"\d+", ground))
        below = [int(colours[behind][place : place + 2], 16) for place in (1, 3, 5)]
        mixed = [
            round((own * percent + other * (100 - percent)) / 100)
            for own, other in zip((red, green, blue), below, strict=True)
        ]
        pair = [luminance(colours[name]), luminance("#{:02x}{:02x}{:02x}".format(*mixed))]
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5, f"{name} on {behind}"


def test_what_a_run_says_cannot_become_markup() -> None:
    nasty = "<script>alert(1)</script>\"' onload=x &amp;"
    changed = replace(
        record(),
        name=nasty,
        params=[{"name": nasty, "value": nasty, "is_set": True}],
        error={"type": nasty, "message": nasty, "traceback": nasty},
        facts={**record().facts, "strategy": nasty},
        history=[{"epoch": 1, nasty: 0.5}],
        failures=[{"at": 1.0, "reason": nasty}],
        logs=[{"at": 1.0, "rank": 0, "level": "WARNING", "line": nasty}],
        hardware={"0": {"host": nasty}},
        versions={nasty: nasty},
        graph={"nodes": [{"name": nasty, "op": nasty, "shape": [1]}], "edges": []},
    )
    found = Checker(page(changed))
    assert "script" not in found.tags
    assert nasty in found.texts


@pytest.mark.parametrize(
    "record_",
    [
        RunRecord(run_id="r", name="n", started=1.0),
        RunRecord(run_id="r", name="n", started=0.0, status="lost"),
        replace(record(), spent={}),
        replace(record(), history=[{"epoch": 1, "loss": None}], steps=[]),
        replace(record(), laps={}, spent={"0": []}, seconds=0.0),
        replace(record(), confusion={"epoch": 1, "counts": [[0, 0], [0, 0]]}),
        replace(record(), confusion={"epoch": 1, "counts": [[1] * 50] * 50}),
    ],
)
def test_whatever_is_missing_is_left_out(record_: RunRecord) -> None:
    assert "NaN" not in page(record_)
    Checker(page(record_))


def test_what_was_chosen_stands_with_its_reason() -> None:
    chosen = {"numWorkers": {"value": 3, "reason": "12 s with 3 workers, <17 s with 2"}}
    shown = page(replace(record(), facts={"chosen": chosen}, laps={"choose": 21.0}))
    assert "Chosen automatically" in shown
    assert "12 s with 3 workers, &lt;17 s with 2" in shown
    assert "That took 21" in shown
    assert "Chosen automatically" not in page(record())


def test_a_failed_run_shows_its_error_first() -> None:
    error = {"type": "WorkerError", "message": "ValueError on rank 1: no", "traceback": "line 3"}
    text = page(replace(record(), status="failed", error=error))
    assert text.index("ValueError on rank 1") < text.index("Learning curves")
    assert "<pre>line 3</pre>" in text


def tile(text: str, name: str) -> str:
    """What the tile of that name shows."""
    (found,) = re.findall(f"<span>{name}</span><b>([^<]*)</b>", text)
    return str(found)


@pytest.mark.parametrize(
    ("begun", "last", "speed"), [(0, 2820, "12,000"), (1410, 2820, "6,000"), (0, 705, "3,000")]
)
def test_the_speed_is_that_of_the_steps_of_this_run(begun: int, last: int, speed: str) -> None:
    """The history also has what an earlier run did; ``maxSteps`` may end in mid-epoch."""
    shown = replace(
        record(),
        attempts=[{"number": 0, "at": 5.0, "start_step": begun}],
        steps=[[6.0, begun + 1, 1.0, None], [65.0, last, None, None]],
        spent={"0": [[5.0, 65.0, {"compute": 60.0, "evaluate": 9.0}]]},
    )
    assert (shown.facts["rows"], shown.facts["steps_per_epoch"]) == (60_000, 235)
    assert tile(page(shown), "rows per s") == speed


def test_what_followed_each_failure() -> None:
    """Of a round, or of a gang that failed again before it was known from where it would go on."""
    failures = [{"at": 10.0 * k, "reason": f"reason {k}"} for k in (1, 2, 3)]
    attempts = [
        {"number": 0, "at": 1.0, "start_step": 0},
        {"number": 1, "at": 12.0, "start_step": None},
        {"number": 2, "at": 23.0, "start_step": 640},
    ]
    text = page(replace(record(), failures=failures, attempts=attempts))
    assert tile(text, "restarts") == "2"
    told = text[text.index("Failures and restarts") :]
    places = [told.index(what) for what in (
        "reason 1", "started again after 2.0 s<", "reason 2", "after 3.0 s, from step 640",
        "reason 3", "the run ended",
    )]  # fmt: skip
    assert places == sorted(places)


def test_reports_of_a_function_that_counts_epochs_too_stand_side_by_side() -> None:
    history = [{"report": k, "epoch": (k + 1) // 2, "loss": 1.0 / k} for k in (1, 2, 3, 4)]
    assert curve_panels(history)["loss"]["loss"][0] == [1.0, 2.0, 3.0, 4.0]
    assert ">report<" in page(replace(record(), history=history, steps=[]))


def test_of_many_ranks_the_lanes_are_few_and_the_table_has_all() -> None:
    text = page(record(num_ranks=100))
    assert text.count('class="ground"') == MOST_LANES
    assert "76 more ranks are in the table" in text
    assert text.count('class="bar"') == 100
    assert len(text) < 2_000_000


def test_the_words_for_time_are_those_of_training() -> None:
    assert SPENT_ON == time_spent.SPENT_ON


def test_what_has_a_colour_of_its_own_is_in_the_style_sheet() -> None:
    css = page(record()).partition("</style>")[0]
    named = [f"on-{word}" for word in SPENT_ON] + [f"u-{band}" for band, *_ in BANDS]
    assert [name for name in named if f".{name} {{ --own: var(--{name})" not in css] == []


def test_on_a_narrow_screen_a_timeline_is_narrow_and_its_letters_are_not_small() -> None:
    (drawn,) = re.findall('<svg[^>]*class="timeline">.*?<h2>', page(record()), re.DOTALL)
    assert "viewBox" not in drawn.partition(">")[0]  # which would scale letters, too
    texts = re.findall('<(?:text|line|circle) [^>]*?x1?="([^"]*)"', drawn)
    assert len(texts) > 12 and all(x.endswith("%") for x in texts if x != "-64")
    assert ">train</text>" in drawn and "tight" in drawn


def test_of_a_long_run_neighbouring_spans_are_drawn_as_one() -> None:
    spans = [[0.0, 1.0, {}], [1.0, 2.0, {}], [2.0, 3.0, {}], [7.0, 8.0, {}], [8.0, 20.0, {}]]
    assert grouped(spans, 2.0) == [spans[:2], spans[2:3], spans[3:4], spans[4:]]
    day = 24 * 3600.0
    spent = {"0": [[10.0 * k, 10.0 * (k + 1), {"data": 4.0, "compute": 6.0}] for k in range(8640)]}
    assert len(page(replace(record(), spent=spent, seconds=day))) < 200_000


def test_layers_that_do_not_move_or_move_too_fast_are_marked() -> None:
    text = layer_section(record().layers)
    rows = re.findall(r"<code>(.*?)</code> (.*?)</td>.*?<td class=\"n\">(.*?)</td>", text)
    marks = [(name, re.sub("<.*?>", "", mark), newest) for name, mark, newest in rows]
    assert marks == [
        ("body.conv1", "", "-2.7"), ("body.norm", "does not move", "0"),
        ("head", "moves too fast", "-0.7"),
    ]  # fmt: skip
    assert text.count("<rect") == 3 * len(record().layers)
    assert re.findall(r'class="(u-\w+)"><title>step 2,652', text) == ["u-good", "u-none", "u-fast"]
    assert "-3 is healthy" in text


def test_of_many_layers_those_with_a_mark_are_shown_and_of_many_looks_some() -> None:
    ratios = {f"layer{k}": 0.5 if k == 99 else 1e-3 for k in range(100)}
    text = layer_section([{"step": step, "ratios": ratios} for step in range(1, 151)])
    assert text.count("<tr>") == 1 + 64 and "<code>layer99</code>" in text
    assert text.count("<rect") == 64 * 76
    assert "36 more layers have no mark." in text


def test_at_the_end_of_a_schedule_layers_stand_still_without_being_dead() -> None:
    looks = [{"step": 1, "ratios": {"a": 1e-3, "b": None}}, {"step": 2, "ratios": {"a": 0.0}}]
    text = layer_section(looks)
    assert "does not move</b>" not in text and "not finite</b>" in text
    assert layer_section([]) == ""


def test_text_is_escaped_unless_it_is_markup() -> None:
    frame = render("base.html", title='<i>"', content=Markup("<i></i>"), is_live=False)
    assert "<title>&lt;i&gt;&#34;</title>" in frame and "<main><i></i></main>" in frame
    assert "<p>1.5</p>" in render("unreadable.html", text=1.50)
    assert "<p></p>" in render("unreadable.html", text=None)
    with pytest.raises(UndefinedError, match="'text' is undefined"):
        render("unreadable.html")


def test_templates_are_found_in_an_archive(tmp_path: Path) -> None:
    """As `spark-submit --py-files` has packages."""
    archive, package = tmp_path / "packages.zip", Path(sparkdl.__file__).parent
    with zipfile.ZipFile(archive, "w") as packed:
        for file in package.rglob("*"):
            if "__pycache__" not in file.parts:
                packed.write(file, file.relative_to(package.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r})\n"
        "from sparkdl.report.page import render, run_list\n"
        "print(render.__file__, 'jinja2' in sys.modules, run_list.run_list([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{archive}/sparkdl/report/page/render.py False <header><h1>Runs")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.0, 12.0), (0.0017, 0.0018), (1e6, 5e6), (2.0, 2.0)]
)
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 12
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    nothing: Any = None
    chart = line_chart("t", {"a": ([1, 2, 3], [1.0, nothing, float("inf")])}, "x")
    assert chart.count("<circle") == 1
    assert line_chart("t", {"a": ([1], [nothing])}, "x") == ""


def test_layers_go_down_and_shortcuts_go_around() -> None:
    assert layers_of(GRAPH) == [[k] for k in range(9)]
    parallel: dict[str, Any] = {"nodes": [{}] * 4, "edges": [[0, 1], [0, 2], [1, 3], [2, 3]]}
    assert layers_of(parallel) == [[0], [1, 2], [3]]
    assert page(record()).count('class="edge skip"') == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.421, "0.42 s"), (9.96, "10 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (7200, "2 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text


def test_runs_of_ranks() -> None:
    assert formats.ranks([0, 1, 2, 5, 7, 8]) == "0\u20132, 5, 7\u20138"
    assert re.fullmatch(r"1.5 KiB", formats.size(1536))
