"""Results as one HTML page that needs nothing else: pictures inside, readable without us."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Sequence
from typing import Any, Final

from .picture import Plot
from .results import Results

_TITLES: Final = {
    "io": "Reading blocks",
    "decode": "Generating under memory limits",
    "cache": "Which experts to keep",
    "timeline": "Where a token's time goes",
}
_INTRODUCTIONS: Final = {
    "io": "How fast this machine reads expert blocks, by the way of reading. Blocks are random "
    "within a layer, layer after layer, as an engine asks for them. Reads through the page cache "
    "are only as fast as the disk when the cache is cold: the state is given below.",
    "decode": "Tokens a second when the whole process, page cache included, may hold no more than "
    "the limit. Every run is a new process with an empty page cache; engines take turns. Ratio: "
    "to the best of the other engine's settings under the same limit, round by round.",
    "cache": "A recorded routing trace replayed through each cache policy. A hit is an expert that "
    "was in memory when its layer asked for it; belady is the best that any policy could do, as it "
    "knows the future.",
    "timeline": "One token in time: reads go on while experts that have arrived are computed. The "
    "table has means over tokens in milliseconds: attention, router, experts, dense (embedding, "
    "shared experts, output head), check (checksums), wait (no block to go on with), other (the "
    "store's bookkeeping); reading is the time in which at least one read was under way.",
}
_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.7rem}h2{margin-top:3rem;border-bottom:1px solid #ccc}
table{border-collapse:collapse;font-size:.82rem;display:block;overflow-x:auto}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
th{background:#f4f4f4}td:first-child,th:first-child,td.text{text-align:left}
figure{margin:1.5rem 0}img{max-width:100%;height:auto}figcaption{color:#555;font-size:.9rem}
code{background:#f4f4f4;padding:.1rem .3rem;overflow-wrap:anywhere}.warn{color:#a33}
dl{display:grid;grid-template-columns:max-content auto;gap:.1rem 1rem}dt{color:#555}dd{margin:0}
"""
_MOST_ROWS: Final = 400


def make_page(found: Sequence[tuple[Results, Sequence[Plot]]]) -> str:
    """The page of these results, in the order given, each with its pictures."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>Colibri: measurements</title><style>{_STYLE}</style>",
        "<h1>Measurements</h1>",
        "<p>How fast a Mixture-of-Experts model runs here when it is larger than memory and its "
        "experts are read from disk. GB are 10<sup>9</sup> bytes, MiB 2<sup>20</sup>. Figures are "
        "medians over rounds, spreads run from the slowest round to the fastest.</p>",
    ]
    if found:
        parts.append(_machine(found[0][0].machine))
    for results, plots in found:
        parts.append(_section(results, plots))
    return "\n".join(parts) + "\n"


def _section(results: Results, plots: Sequence[Plot]) -> str:
    kind = results.kind
    parts = [f"<h2>{_TITLES[kind]}</h2>", f"<p>{_INTRODUCTIONS[kind]}</p>"]
    if not results.is_complete:
        parts.append("<p class=warn>Interrupted: these results are partial.</p>")
    for plot in plots:
        data = base64.b64encode(plot.svg).decode()
        caption = html.escape(plot.caption)
        parts.append(
            f"<figure><img alt='{html.escape(plot.caption, quote=True)}' "
            f"src='data:image/svg+xml;base64,{data}'><figcaption>{caption}</figcaption></figure>"
        )
    if results.notes:
        parts.append("<ul>" + "".join(map(_note, results.notes)) + "</ul>")
    # A timeline's rows are for the pictures; what people read are the sums.
    parts.append(_table(results.extra.get("tokens", ()) if kind == "timeline" else results.rows))
    command = html.escape(shlex.join(map(str, results.command)))
    parts.append(f"<p>Made {html.escape(results.made_at)} by <code>{command}</code></p>")
    return "\n".join(parts)


def _note(text: str) -> str:
    # What a benchmark found wrong with itself begins in capitals.
    is_warning = text.partition(":")[0].isupper()
    return f"<li{' class=warn' if is_warning else ''}>{html.escape(text)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "<p>No figures.</p>"
    names = list(dict.fromkeys(name for row in rows for name in row))
    # A column that holds the same nothing everywhere says nothing.
    names = [n for n in names if any(row.get(n) not in (None, "") for row in rows)]
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}" for name in names)
    body = "".join(
        "<tr>" + "".join(_cell(row.get(name)) for name in names) for row in rows[:_MOST_ROWS]
    )
    more = ""
    if len(rows) > _MOST_ROWS:
        more = f"<p>{len(rows) - _MOST_ROWS} more rows are in the result file.</p>"
    return f"<table><tr>{head}{body}</table>{more}"


def _cell(value: object) -> str:
    if value is None:
        return "<td>"
    if isinstance(value, bool):
        return f"<td class=text>{'yes' if value else 'no'}"
    if isinstance(value, float):
        return f"<td>{value:.4g}"
    if isinstance(value, int):
        return f"<td>{value:,}"
    return f"<td class=text>{html.escape(str(value))}"


def _machine(facts: dict[str, Any]) -> str:
    memory = facts.get("memory_bytes")
    disk, packages = facts.get("disk"), facts.get("packages")
    disk = disk if isinstance(disk, dict) else {}
    packages = packages if isinstance(packages, dict) else {}
    features = facts.get("cpu_features")
    entries = {
        "system": facts.get("system"),
        "processor": facts.get("cpu"),
        "processors": facts.get("n_cpus"),
        "features": ", ".join(map(str, features)) if isinstance(features, list | tuple) else None,
        "memory": f"{memory / 2**30:.1f} GiB" if isinstance(memory, int) else None,
        "disk": ", ".join(
            str(disk[key])
            for key in ("device", "model", "file_system", "scheduler")
            if disk.get(key)
        ),
        "python": facts.get("python"),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items()),
    }
    lines = "".join(
        f"<dt>{html.escape(name)}<dd>{html.escape(str(value))}"
        for name, value in entries.items()
        if value
    )
    return f"<h2>The machine</h2><dl>{lines}</dl>"
