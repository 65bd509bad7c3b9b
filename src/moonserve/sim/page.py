"""The frame of the HTML report: its style, and [[slots]] that sim.report fills."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>[[title]] - moonserve simulate</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1b1b1a; --soft: #5c5b57; --rule: #e4e3de;
  --c1: #2a78d6; --c2: #d9581f; --c3: #17906a; --quiet: #8b8a85;
  --good: #0a7d2c; --bad: #c22b2b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141413; --card: #1e1e1d; --ink: #f1f0ec; --soft: #b3b1a9; --rule: #363633;
    --c1: #5a9df0; --c2: #ee8350; --c3: #3dbd8f; --quiet: #8f8e88;
    --good: #52c272; --bad: #f07575;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 20px 60px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { margin: 0; font-size: 24px; font-weight: 650; }
header p { margin: 4px 0 20px; color: var(--soft); }
h2, figcaption { margin: 0; font-size: 14px; font-weight: 600; }
section, .tile, figure {
  margin: 0; padding: 14px 16px; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px;
}
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
.tile h2 { color: var(--soft); font-weight: 500; }
.tile b { display: block; margin: 2px 0; font-size: 26px; font-weight: 600; }
.tile p { margin: 0; color: var(--soft); font-size: 13px; }
.tile span { font-weight: 600; white-space: nowrap; }
span.good { color: var(--good); }
span.bad { color: var(--bad); }
.charts { display: grid; gap: 12px; margin: 12px 0; grid-template-columns: repeat(2, 1fr); }
@media (max-width: 760px) { .charts { grid-template-columns: 1fr; } }
.charts > figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 3px; margin: 0 6px 4px 0; }
.legend i.c1 { background: var(--c1); } .legend i.c2 { background: var(--c2); }
.legend i.c3 { background: var(--c3); } .legend i.quiet { background: var(--quiet); }
svg { display: block; width: 100%; height: auto; margin-top: 8px; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
text.end { text-anchor: end; } text.mid { text-anchor: middle; }
text.goal { fill: var(--bad); }
.grid { stroke: var(--rule); } .axis { stroke: var(--quiet); fill: none; }
path.goal { stroke: var(--bad); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.quiet { stroke: var(--quiet); }
rect.c1 { fill: var(--c1); } rect.c2 { fill: var(--c2); }
.note, .empty { margin: 6px 0 0; color: var(--soft); font-size: 13px; }
section { margin-top: 12px; overflow-x: auto; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; font-size: 13px; }
th, td {
  padding: 4px 10px 4px 0; border-top: 1px solid var(--rule); text-align: right;
  font-weight: 400; font-variant-numeric: tabular-nums; vertical-align: top;
}
th:first-child, .text { text-align: left; }
thead th { border-top: 0; color: var(--soft); }
summary { cursor: pointer; font-size: 14px; font-weight: 600; }
details td { overflow-wrap: anywhere; text-align: left; }
</style>
<header><h1>[[title]]</h1><p>[[subtitle]]</p></header>
<div class="tiles">
[[tiles]]
</div>
<div class="charts">
[[charts]]
</div>
[[timelines]]
<section>
<h2>The longest times to first token</h2>
<table>
<thead><tr><th>request</th><th>TTFT</th><th>TBT</th><th>arrived</th><th>input</th>
<th>reused</th><th class="text">made of</th></tr></thead>
[[slowest]]
</table>
<p class="note">Parts of at least a tenth, as predicted when the request was placed;
moonserve simulate --explain REQUEST tells the whole decision.</p>
</section>
<section>
<details><summary>All figures</summary><table>
[[figures]]
</table></details>
</section>
</html>
"""
