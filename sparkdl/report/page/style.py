"""The style sheet of reports: bright and dark, on screen and on paper."""

from __future__ import annotations

from sparkdl.report.page.layer_strips import BANDS
from sparkdl.report.page.timeline import SPENT_ON

_LIGHT = """
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2430; --quiet: #667085; --rule: #e4e7ec;
  --ground: #eef0f3; --accent: #2563eb; --good: #0f9d6b; --bad: #d92d20; --warn: #b54708;
  --c0: #2563eb; --c1: #e8590c; --c2: #0f9d6b; --c3: #9333ea; --c4: #c2255c; --c5: #0c8599;
  --on-data: #4c8df6; --on-compute: #2fb380; --on-communication: #f2a93b; --on-waiting: #e5604d;
  --on-evaluate: #9b6ddf; --on-checkpoint: #26a8bd; --on-other: #a8b0bd;
  --u-none: #4b5563; --u-slow: #7c9fe0; --u-less: #a9d8c4; --u-good: #2fb380; --u-more: #f2c14e;
  --u-fast: #e5604d;
  --shadow: 0 1px 2px rgb(16 24 40 / 6%), 0 1px 3px rgb(16 24 40 / 8%);
"""
_DARK = """
  --page: #11151c; --card: #1a202b; --ink: #e6e9ef; --quiet: #98a2b3; --rule: #2c3443;
  --ground: #242c39; --accent: #7aa7ff; --good: #3ccf97; --bad: #ff7b6e; --warn: #f5b567;
  --c0: #7aa7ff; --c1: #ff9f5a; --c2: #3ccf97; --c3: #c79bff; --c4: #ff85b0; --c5: #4fd0e0;
  --on-data: #5b94f0; --on-compute: #2fa678; --on-communication: #d9982f; --on-waiting: #d9604f;
  --on-evaluate: #9a78d6; --on-checkpoint: #2a9dae; --on-other: #6b7484;
  --u-none: #cbd2dc; --u-slow: #4a6fb8; --u-less: #3d7a66; --u-good: #2fa678; --u-more: #d9a92f;
  --u-fast: #d9604f;
  --shadow: none;
"""

CSS = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans",
    sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 15px; margin: 0 0 14px; }
h3 { font-size: 13px; margin: 18px 0 8px; color: var(--quiet); font-weight: 600; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
p { margin: 6px 0; }
.quiet, .hint { color: var(--quiet); }
.hint { font-size: 12.5px; }
header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; }
header + p { margin: 4px 0 20px; }
.badge { display: inline-block; padding: 2px 10px; border-radius: 99px; font-size: 12px;
  font-weight: 600; color: var(--quiet); background: var(--ground); white-space: nowrap; }
.badge.succeeded { color: var(--good); background: rgb(15 157 107 / 13%); }
.badge.failed, .badge.lost { color: var(--bad); background: rgb(217 45 32 / 12%); }
.badge.running { color: var(--accent); background: rgb(37 99 235 / 13%); }
.badge.running::before { content: ""; display: inline-block; width: 7px; height: 7px;
  margin-right: 6px; border-radius: 50%; background: currentColor; animation: beat 1.6s infinite; }
@keyframes beat { 50% { opacity: 0.25; } }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); gap: 12px;
  margin-bottom: 16px; }
.tile, section { background: var(--card); border-radius: 12px; box-shadow: var(--shadow); }
.tile { padding: 13px 16px; }
.tile span { display: block; color: var(--quiet); font-size: 12px; }
.tile b { font-size: 18px; font-weight: 650; white-space: nowrap; letter-spacing: -0.01em; }
.tile small { display: block; color: var(--quiet); }
section { padding: 20px 22px; margin-bottom: 16px; overflow-x: auto; overflow-wrap: anywhere; }
section.trouble { border-left: 4px solid var(--bad); }
pre { margin: 10px 0 0; padding: 12px 14px; white-space: pre-wrap; border-radius: 8px;
  background: var(--ground); font: 12px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); font-size: 12.5px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child > td, tr:last-child > th { border-bottom: 0; }
td.n, th.n { text-align: right; overflow-wrap: normal; }
.pairs th { width: min(230px, 40%); }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; }
details summary { cursor: pointer; color: var(--quiet); margin-top: 10px; }
figure { margin: 0; }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--quiet); font-size: 12.5px; }
.entry { white-space: nowrap; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr));
  gap: 20px; }
.chart, .timeline { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-family: inherit; }
svg .tick { fill: var(--quiet); font-size: 11px; }
svg .label { fill: var(--quiet); font-size: 11.5px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.mark { stroke: var(--card); stroke-width: 1; }
.ground { fill: var(--ground); }
.phase { fill: var(--on-other); opacity: 0.45; }
.phase.p1 { opacity: 0.7; }
svg .inside { font-size: 11px; }
line.failure { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
circle.failure { fill: var(--bad); }
line.restart { stroke: var(--good); stroke-width: 1.5; }
.bar { display: flex; height: 12px; min-width: 180px; border-radius: 4px; overflow: hidden;
  background: var(--ground); margin-top: 4px; }
.bar i { display: block; }
.matrix { width: auto; border-spacing: 2px; border-collapse: separate; overflow-wrap: normal; }
.matrix td, .matrix th { border: 0; text-align: center; padding: 3px 6px; min-width: 30px;
  border-radius: 4px; }
.matrix.many { font-size: 11px; border-spacing: 1px; }
.matrix.many td, .matrix.many th { padding: 3px 2px; min-width: 14px; }
.matrix.dense td { min-width: 6px; padding: 0; height: 8px; border-radius: 1px; }
.layers td:nth-child(2) { width: 60%; }
.strip { display: block; width: 100%; height: 16px; margin-top: 3px; }
.scroll { max-height: 560px; overflow: auto; }
.graph { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.node { fill: var(--card); stroke: var(--on-other); stroke-width: 1.3; }
svg .name { font-size: 12px; font-weight: 600; }
svg .small { font-size: 10.5px; fill: var(--quiet); }
.edge { fill: none; stroke: var(--on-other); stroke-width: 1.3; }
.edge.skip { stroke-dasharray: 3 3; }
.k-conv { stroke: var(--c0); fill: rgb(37 99 235 / 9%); }
.k-linear { stroke: var(--c2); fill: rgb(15 157 107 / 9%); }
.k-norm { stroke: var(--c3); fill: rgb(147 51 234 / 7%); }
.k-pool { stroke: var(--c5); fill: rgb(12 133 153 / 8%); }
.k-embed, .k-attend { stroke: var(--c4); fill: rgb(194 37 92 / 7%); }
.k-recur { stroke: var(--c1); fill: rgb(232 89 12 / 8%); }
.k-end, .k-quiet { fill: var(--ground); stroke: none; }
.runs td { vertical-align: middle; }
.rows th, .runs td[data-name="loss"] { overflow-wrap: normal; }
@media (max-width: 1040px) { .matrix.many td { font-size: 0; } }
@media (max-width: 860px) {
  .matrix { width: 100%; table-layout: fixed; }
  .matrix td, .matrix th { padding: 3px 0; min-width: 0; overflow: hidden; font-size: 9px; }
  .matrix td { font-size: 0; height: 12px; }
  .rows, .rows tbody, .rows tr { display: block; }
  .rows tr:first-child { display: none; }
  .rows tr { border-bottom: 1px solid var(--rule); padding: 8px 0; }
  .rows td { display: inline-block; border: 0; padding: 1px 14px 1px 0; text-align: left; }
  .rows td:has(.bar) { display: block; }
  .rows td[data-name]:not(:empty)::before { content: attr(data-name) " "; color: var(--quiet); }
}
footer { color: var(--quiet); font-size: 12px; margin-top: 24px; }
@media print { body { background: none; } section, .tile { box-shadow: none;
  break-inside: avoid; border: 1px solid var(--rule); } .scroll { max-height: none; } }
"""
    + "".join(
        f".on-{name} {{ fill: var(--on-{name}); }} .key.on-{name}, .bar .on-{name} "
        f"{{ background: var(--on-{name}); }}\n"
        for name in SPENT_ON
    )
    + "".join(
        f".line.c{k} {{ stroke: var(--c{k}); }} .mark.c{k} {{ fill: var(--c{k}); }} "
        f".key.c{k} {{ background: var(--c{k}); }}\n"
        for k in range(6)
    )
    + "".join(
        f".u-{name} {{ fill: var(--u-{name}); }} .key.u-{name} {{ background: var(--u-{name}); }}\n"
        for name, *_ in BANDS
    )
)
"""Of a page; all of it, since a report brings everything along."""
