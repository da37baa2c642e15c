"""The report's style sheet: light and dark by the reader's setting, plain on paper, system fonts only."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  --ground: #fbfbfa; --card: #ffffff; --ink: #1d2125; --soft: #5b636c; --line: #e3e5e8;
  --pass: #1a7f4b; --pass-ground: #e5f4ec; --fail: #b3261e; --fail-ground: #fbe9e7;
  --open: #8a5a00; --open-ground: #fdf1dc;
  --series-1: #2f6fde; --series-2: #d9822b; --series-3: #2b9a66; --series-4: #b5509c;
  --series-5: #6b6f76; --series-6: #c23b3b; --series-7: #0f8ea3; --series-8: #8a6d1b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --card: #1c2024; --ink: #e7e9ec; --soft: #a2abb5; --line: #30363c;
    --pass: #63d297; --pass-ground: #17352a; --fail: #ff8a80; --fail-ground: #43201f;
    --open: #f2bd62; --open-ground: #3d3018;
    --series-1: #6ea3ff; --series-2: #f2a65a; --series-3: #5cc795; --series-4: #dd85c8;
    --series-5: #a9afb7; --series-6: #ef7d7d; --series-7: #4fc3d5; --series-8: #cfae57;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 0.9rem; }
p { margin: 0 0 0.6rem; }
.eyebrow { color: var(--soft); font-size: 0.85rem; letter-spacing: 0.06em; text-transform: uppercase; margin: 0; }
.verdict { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; align-items: baseline; padding: 0.9rem 1.1rem;
  border-radius: 10px; border-left: 6px solid; }
.verdict strong { font-size: 1.2rem; }
.verdict.pass { background: var(--pass-ground); border-color: var(--pass); }
.verdict.pass strong { color: var(--pass); }
.verdict.fail { background: var(--fail-ground); border-color: var(--fail); }
.verdict.fail strong { color: var(--fail); }
.verdict .cause { flex-basis: 100%; margin: 0.3rem 0 0; overflow-wrap: anywhere; }
.next li { margin: 0 0 0.4rem; overflow-wrap: anywhere; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.warning { background: var(--open-ground); color: var(--open); border-radius: 10px; padding: 0.6rem 1.1rem;
  margin-top: 0.6rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 0.8rem 1.5rem;
  margin: 1.5rem 0 0; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.facts .wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.6rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.45rem 0.8rem 0.45rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 600; font-size: 0.82rem; white-space: nowrap; }
td { min-width: 6rem; }
th.num, td.num { text-align: right; white-space: nowrap; min-width: 0; padding-right: 1.6rem; }
.gates td:first-child { width: 8.5rem; }
.gates .layer th { padding-top: 1.1rem; font-size: 0.8rem; letter-spacing: 0.06em; text-transform: uppercase;
  color: var(--soft); }
.gates p { margin: 0; }
.gates .evidence, .gates .conditions, .gates .proof, .note { color: var(--soft); font-size: 0.86rem;
  white-space: pre-line; }
.gates .id { color: var(--soft); font: 0.76rem ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.gates .value { min-width: 7.5rem; max-width: 14rem; }
.pill { display: inline-block; border-radius: 999px; padding: 0.05rem 0.65rem; font-size: 0.82rem; font-weight: 600;
  white-space: nowrap; }
.pill.pass { background: var(--pass-ground); color: var(--pass); }
.pill.fail { background: var(--fail-ground); color: var(--fail); }
.pill.not-measured { background: var(--open-ground); color: var(--open); }
.tag { border: 1px solid var(--line); border-radius: 4px; color: var(--soft); font-size: 0.75rem; padding: 0 0.3rem; }
.answers { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr));
  align-items: start; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem;
  break-inside: avoid; }
.pictures { display: flex; flex-wrap: wrap; gap: 0.6rem; margin-bottom: 0.7rem; }
figure { margin: 0; }
.pictures img { max-width: 100%; max-height: 11rem; border-radius: 6px; background: #ffffff; display: block;
  border: 1px solid var(--line); }
figcaption { color: var(--soft); font-size: 0.78rem; }
.question, .answer { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto; }
.question { font-weight: 600; max-height: 10.4rem; } /* the cut line shows that more follows */
.meta { color: var(--soft); font-size: 0.82rem; margin: 0; }
bdi { unicode-bidi: isolate; }
.chart { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.4rem;
  margin-bottom: 1rem; overflow-x: auto; break-inside: avoid; }
.chart svg { display: block; width: 100%; min-width: 34rem; }
.environment td { padding-top: 0.2rem; padding-bottom: 0.2rem; }
.environment td:first-child { width: 16rem; color: var(--soft); }
summary { cursor: pointer; color: var(--soft); }
@media screen and (max-width: 44rem) {
  .gates thead { display: none; }
  .gates tr { display: grid; grid-template-columns: 1fr 1fr; border-bottom: 1px solid var(--line); padding: 0.5rem 0; }
  .gates th, .gates td { border: 0; padding-top: 0.15rem; padding-bottom: 0.15rem; }
  .gates .layer th, .gates td:first-child, .gates td:nth-child(2) { grid-column: 1 / -1; }
  .gates td:nth-child(3)::before { content: "Found "; color: var(--soft); }
  .gates td:nth-child(4)::before { content: "Threshold "; color: var(--soft); }
}
@media print {
  :root { --ground: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; color-scheme: light; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  tr { break-inside: avoid; }
  .question, .answer { max-height: none; overflow: visible; }
  .scroll, .chart { overflow: visible; }
  .verdict, .pill, .warning { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
