"""The style and the script of an evaluation's page, which refers to nothing outside itself."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #dfe3ea; --paper: #fff; --back: #f5f6f8;
  --policy: #2f6fde; --policy-back: #f0f5ff; --world: #b7791f; --world-back: #fdf8ee; --right: #1e8e4e;
  --wrong: #c8372d; --failed: #8a8f98; --mark: #fff0a8; --bar: #9db9ee; --track: #eceff4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #98a2b3; --line: #343b48; --paper: #1c212b;
  --back: #12161d; --policy: #7aa7ff; --policy-back: #1a2740; --world: #e0ac57; --world-back: #2b2416;
  --right: #4cc07d; --wrong: #f07a70; --failed: #7d8590; --mark: #6b5b12; --bar: #3f5f9e; --track: #2a303c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 20px 80px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
[hidden] { display: none !important; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; color: var(--soft); font-weight: 600; }
.facts { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.facts b { color: var(--ink); font-weight: 500; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  margin: 0 0 14px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; padding: 3px 12px 5px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 120px; }
td.few { color: var(--soft); }
td small { color: var(--soft); font-size: 12px; }
.wide td, .wide th { width: 1%; } .wide td:first-child { white-space: nowrap; padding-right: 24px; }
.wide td.bar { width: 30%; padding-right: 24px; }
.wide td { vertical-align: middle; }
.track { position: relative; height: 12px; min-width: 60px; background: var(--track); border-radius: 3px; }
td small + .track { height: 5px; margin: 2px 0 1px; } td small + .track u { top: 2px; height: 1px; }
.track i { position: absolute; top: 0; bottom: 0; left: 0; background: var(--bar); border-radius: 3px; }
.track u { position: absolute; top: 5px; height: 2px; background: var(--ink); opacity: .65; }
.tools { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 8px; align-items: center;
  padding: 10px 0; background: var(--back); border-bottom: 1px solid var(--line); margin-bottom: 10px; }
.tools input, .tools select, .tools button { font: inherit; font-size: 14px; padding: 5px 9px; color: var(--ink);
  background: var(--paper); border: 1px solid var(--line); border-radius: 7px; max-width: 150px; }
.tools input { flex: 1 1 160px; max-width: none; }
.tools output { color: var(--soft); font-size: 14px; margin-left: auto; white-space: nowrap; }
.episode { background: var(--paper); border: 1px solid var(--line); border-radius: 9px; margin: 0 0 7px;
  content-visibility: auto; contain-intrinsic-size: auto 44px; }
.row { display: flex; gap: 10px; align-items: baseline; padding: 9px 14px; }
summary.row { cursor: pointer; list-style: none; }
summary.row::-webkit-details-marker { display: none; }
summary.row:hover { background: var(--back); border-radius: 9px; }
.state { flex: none; width: 18px; font-weight: 700; }
.right .state { color: var(--right); } .wrong .state { color: var(--wrong); } .failed .state { color: var(--failed); }
.title { flex: 1 1 auto; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  unicode-bidi: isolate; }
details[open] > .row .title { white-space: normal; overflow-wrap: anywhere; font-weight: 500; }
.numbers { flex: none; color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.chip { flex: none; font-size: 12px; color: var(--soft); border: 1px solid var(--line); border-radius: 20px;
  padding: 0 8px; white-space: nowrap; max-width: 160px; overflow: hidden; text-overflow: ellipsis; }
.body { padding: 4px 14px 14px; border-top: 1px solid var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 10px 0 12px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; unicode-bidi: isolate; }
dd.right { color: var(--right); font-weight: 600; } dd.wrong { color: var(--wrong); font-weight: 600; }
.say { border-left: 4px solid var(--line); border-radius: 0 7px 7px 0; padding: 7px 12px 9px; margin: 7px 0; }
.say > h4 { margin: 0 0 3px; font-size: 12px; font-weight: 600; color: var(--soft); }
.say.policy { border-color: var(--policy); background: var(--policy-back); }
.say.policy > h4 b { color: var(--policy); }
.say.world { border-color: var(--world); background: var(--world-back); }
.say.world > h4 b { color: var(--world); }
.say.prompt { background: var(--back); }
.say > h4 .bad { color: var(--wrong); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 520px;
  overflow-y: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tag { color: var(--soft); font-weight: 600; }
.policy .tag { color: var(--policy); } .world .tag { color: var(--world); }
mark { background: var(--mark); color: inherit; border-radius: 2px; padding: 0 1px; }
.left { color: var(--soft); font-style: italic; }
.fold > summary { cursor: pointer; color: var(--soft); font-size: 13px; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 12px; }
"""

SCRIPT = """
(() => {
  const items = [...document.querySelectorAll('.episode')];
  const search = document.getElementById('search');
  const selects = [...document.querySelectorAll('select[data-filter]')];
  const count = document.getElementById('count');
  const texts = new Map();
  const textOf = (item) => {
    let text = texts.get(item);
    if (text === undefined) texts.set(item, text = item.textContent.toLowerCase());
    return text;
  };
  const apply = () => {
    const wanted = selects.filter((one) => one.value !== '').map((one) => [one.dataset.filter, one.value.slice(1)]);
    const words = search.value.toLowerCase().split(/\\s+/).filter((word) => word !== '');
    let shown = 0;
    for (const item of items) {
      const fits = wanted.every(([key, value]) => item.dataset[key] === value)
        && words.every((word) => textOf(item).includes(word));
      item.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    count.textContent = `${shown.toLocaleString('en')} of ${items.length.toLocaleString('en')} episodes`;
  };
  let timer = 0;
  search.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(apply, 150); });
  selects.forEach((one) => one.addEventListener('change', apply));
  document.getElementById('open').addEventListener('click', () => {
    items.filter((item) => !item.hidden && item.tagName === 'DETAILS').slice(0, 50).forEach((item) => {
      item.open = true;
    });
  });
  document.getElementById('close').addEventListener('click', () => {
    items.forEach((item) => { if (item.tagName === 'DETAILS') item.open = false; });
  });
  document.querySelector('.tools').hidden = false;
  apply();
})();
"""
