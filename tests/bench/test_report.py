"""Plots and the page: made of any results, saying what they show."""

import builtins
import re
from html.parser import HTMLParser

import pytest

from colibri_bench.cmd_bench import main
from colibri_bench.picture import size_label
from colibri_bench.plots import plot_results
from colibri_bench.report_page import make_page
from colibri_bench.results import Results, save_results
from colibri_bench.token_time import SHARES
from colibri_format import UsageError

PNG = b"\x89PNG\r\n\x1a\n"
IO = [
    {"engine": e, "phase": "re-read", "block_bytes": b, "depth": d, "gb_per_s": 1.0 * d,
     "slowest": 0.9 * d, "fastest": 1.2 * d}
    for e in ("uring", "threads") for b in (65536, 2**20) for d in (1, 4)
]  # fmt: skip
DECODE = [
    {"limit": limit, "arm": arm, "is_ours": arm == "colibri", "tokens_per_s": 4.0,
     "slowest": 3.0, "fastest": 5.0, "ratio": 2.0}
    for limit in ("none", "50%") for arm in ("colibri", "llama.cpp 2 threads")
]  # fmt: skip
CACHE = [
    {"policy": p, "share": s, "hit_rate": s}
    for p in ("lru", "belady") for s in (0.1, 0.5)
]  # fmt: skip
TIMELINE = [
    {"limit": "50%", "kind": kind, "layer": layer, "start_ms": 4.0 * layer + start,
     "end_ms": 4.0 * layer + end, "is_prefetch": kind == "read" and layer == 1}
    for layer in range(4)
    for kind, start, end in (("attention", 0.0, 1.0), ("read", 0.5, 3.0), ("read", 0.6, 3.0),
                             ("wait", 1.0, 3.0), ("check", 3.0, 3.2), ("experts", 3.2, 4.0))
]  # fmt: skip
TOKENS = [{"limit": "50%", **dict.fromkeys(SHARES, 2.0), "total": 14.0}]
ALL = {"io": IO, "decode": DECODE, "cache": CACHE, "timeline": TIMELINE}


def results(kind, rows=None, **changes):
    values = {"kind": kind, "command": ["colibri", "bench", kind], "machine": {"cpu": "x <b>"}}
    if kind == "timeline":
        values["extra"] = {"tokens": TOKENS if rows is None else []}
    return Results(**(values | {"rows": ALL[kind] if rows is None else rows} | changes))


@pytest.fixture(scope="module")
def pictures():
    """The plots of each kind, made once: they take a while."""
    return {kind: plot_results(results(kind)) for kind in ALL}


@pytest.mark.parametrize(
    ("kind", "names"),
    [("io", ["io-by-block-size", "io-by-depth"]), ("decode", ["decode-by-limit"]),
     ("cache", ["hits-by-size"]), ("timeline", ["token-time", "timeline-50"])],
)  # fmt: skip
def test_each_kind_has_its_pictures(kind, names, pictures):
    plots = pictures[kind]

    assert [plot.name for plot in plots] == names
    assert all(plot.png.startswith(PNG) and b"<svg" in plot.svg for plot in plots)


@pytest.mark.parametrize("kind", ALL)
def test_results_without_rows_have_none(kind):
    assert plot_results(results(kind, [])) == []


def test_engines_that_failed_everywhere_leave_no_hole():
    failed = {"limit": "15%", "arm": "llama.cpp 2 threads", "is_ours": False,
              "tokens_per_s": None, "slowest": None, "fastest": None}  # fmt: skip

    assert len(plot_results(results("decode", [*DECODE, failed]))) == 1


def test_one_block_size_is_bars_not_a_line():
    size = IO[0]["block_bytes"]
    plot = plot_results(results("io", [row for row in IO if row["block_bytes"] == size]))[0]

    assert plot.name == "io-by-block-size"
    assert "Read rate of blocks of" in svg_text(plot)


def svg_text(plot):
    """The text that a picture shows; letters are drawn, but named in comments."""
    return " ".join(re.findall(r"<!-- (.*?) -->", plot.svg.decode()))


def test_depths_stand_in_a_panel_for_each_block_size(pictures):
    text = svg_text(pictures["io"][1])

    assert text.count("blocks of") == len({row["block_bytes"] for row in IO if row["depth"]})


def test_lanes_without_spans_are_left_out():
    rows = [row for row in TIMELINE if row["kind"] != "check"]
    plots = plot_results(results("timeline", rows))

    assert "check" not in svg_text(plots[-1])


def test_the_same_results_give_the_same_png(pictures):
    assert plot_results(results("timeline"))[0].png == pictures["timeline"][0].png


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError) as caught:
        plot_results(results("io"))

    assert caught.value.code == "no-matplotlib"


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources = []
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def test_page_needs_nothing_from_elsewhere(pictures):
    page = make_page([(results(kind), pictures[kind]) for kind in ALL])
    parsed = _Page()
    parsed.feed(page)

    assert len(parsed.sources) == 6
    assert all(source.startswith("data:image/svg+xml;base64,") for source in parsed.sources)
    assert not {"script", "link"} & set(parsed.tags)


def test_page_escapes_what_it_was_given():
    page = make_page([(results("cache", notes=["<i>note"], command=["a b", "<c>"]), [])])

    assert "x &lt;b&gt;" in page
    assert "&lt;i&gt;note" in page
    assert re.search(r"<code>.*'a b' '&lt;c&gt;'|&#x27;a b&#x27;", page)


def test_page_says_that_results_are_partial():
    assert "partial" in make_page([(results("io", is_complete=False), [])])


def test_command_writes_plots_and_page(tmp_path, capsys):
    for kind in ("decode", "timeline"):
        save_results(results(kind), tmp_path)

    assert main(["report", str(tmp_path)]) == 0

    printed = capsys.readouterr().out.split()
    assert len(printed) == 7
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_command_without_results_says_how_to_make_some(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "error[no-results]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "label"), [(4096, "4 KiB"), (2**20, "1 MiB"), (3670016, "3.5 MiB")]
)
def test_sizes_are_told_in_their_unit(size, label):
    assert size_label(size) == label
