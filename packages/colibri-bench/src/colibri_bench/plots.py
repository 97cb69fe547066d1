"""Results as pictures, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from colibri_format import StorageError

from .picture import (
    HATCHES,
    SHADES,
    Plot,
    Rows,
    finish_plot,
    legend_beside,
    limit_label,
    line_look,
    make_figure,
    size_label,
)
from .results import Results
from .timeline_plot import plot_sums, plot_timelines

_RATE: Final = "GB/s (10^9 bytes)"
_SHIFT: Final = 0.06
"""Doublings of x by which engines stand apart."""

_MOST_PANELS: Final = 8


def plot_results(results: Results) -> list[Plot]:
    """The pictures of one result file; none where it has no rows to show.

    Raises:
        UsageError: `no-matplotlib`.
    """
    makers: dict[str, Sequence[Callable[[Rows], Plot | None]]] = {
        "io": (_io_by_block_size, _io_by_depth),
        "decode": (_decode_by_limit,),
        "cache": (_hits_by_size,),
        "timeline": (lambda rows: plot_sums(results.extra.get("tokens") or ()),),
    }
    made = [make(results.rows) for make in makers[results.kind]]
    if results.kind == "timeline":
        made += plot_timelines(results.rows)
    return [plot for plot in made if plot is not None]


def save_plots(plots: Iterable[Plot], folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg for each; the files written.

    Raises:
        StorageError: what the kernel refused.
    """
    paths = []
    for plot in plots:
        for ending, data in (("png", plot.png), ("svg", plot.svg)):
            path = folder / f"{plot.name}.{ending}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            except OSError as error:
                raise StorageError.of(error, path, "writing a plot") from error
            paths.append(path)
    return paths


def _last_phase(rows: Rows) -> tuple[Rows, str]:
    """Readings of what had been read before, where there are any: one line for each engine; and
    what to say of that."""
    rows = [row for row in rows if row.get("gb_per_s") is not None]
    again = [row for row in rows if row.get("phase") == "re-read"]
    return (again, ", blocks read again") if again else (rows, "")


def _io_by_block_size(rows: Rows) -> Plot | None:
    """Throughput of each engine by block size, each at its best depth."""
    rows, told = _last_phase(rows)
    best: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        of_engine = best.setdefault(str(row["engine"]), {})
        known = of_engine.get(row["block_bytes"])
        if known is None or row["gb_per_s"] > known["gb_per_s"]:
            of_engine[row["block_bytes"]] = row
    if not best:
        return None
    sizes = sorted({size for points in best.values() for size in points})
    caption = (
        f"Read rate of each way to read by block size, at its best queue depth{told}; bars from "
        "the slowest to the fastest round."
    )
    if len(sizes) == 1:
        title = f"Read rate of blocks of {size_label(sizes[0])}{told}"
        return _io_of_one_size([points[sizes[0]] for points in best.values()], title, caption)
    figure, (axes,) = make_figure(f"Read rate by block size{told}", "block size", _RATE)
    for number, (name, points) in enumerate(best.items()):
        # Beside each other, so that no bar hides another.
        shift = 2 ** (_SHIFT * (number - (len(best) - 1) / 2))
        _draw_rates(axes, {size * shift: points[size] for size in sorted(points)}, name, number)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_label(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return finish_plot(figure, "io-by-block-size", caption)


def _io_of_one_size(rows: Rows, title: str, caption: str) -> Plot:
    """Where there is one size there is no line: a bar for each engine."""
    figure, (axes,) = make_figure(title, _RATE, "")
    axes.barh(
        range(len(rows)), [row["gb_per_s"] for row in rows], 0.7, xerr=_errors(rows), capsize=3,
        color=SHADES[0], ecolor="#888888",
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["engine"] for row in rows])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axes.invert_yaxis()
    return finish_plot(figure, "io-by-block-size", caption)


def _io_by_depth(rows: Rows) -> Plot | None:
    """Throughput by queue depth for the engines that have one: a panel a size, a line an engine."""
    rows, told = _last_phase(rows)
    lines: dict[tuple[int, str], dict[float, dict[str, Any]]] = {}
    for row in rows:
        if row.get("depth"):
            lines.setdefault((row["block_bytes"], str(row["engine"])), {})[row["depth"]] = row
    lines = {key: points for key, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    sizes = sorted({size for size, _ in lines})[:_MOST_PANELS]
    names = list(dict.fromkeys(name for _, name in lines))
    n_columns = min(2, len(sizes))
    figure, panels = make_figure(
        f"Read rate by queue depth{told}", "requests in flight", _RATE,
        n_rows=-(-len(sizes) // n_columns), n_columns=n_columns,
    )  # fmt: skip
    depths = sorted({depth for points in lines.values() for depth in points})
    for axes, size in zip(panels, sizes, strict=False):
        axes.set_title(f"blocks of {size_label(size)}", fontsize=9, loc="left")
        for number, name in enumerate(names):
            shift = 2 ** (_SHIFT * (number - (len(names) - 1) / 2))
            points = lines.get((size, name), {})
            _draw_rates(axes, {d * shift: points[d] for d in sorted(points)}, name, number)
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [f"{depth:g}" for depth in depths])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    for axes in panels[len(sizes) :]:
        axes.set_visible(False)
    legend_beside(panels[n_columns - 1])
    return finish_plot(
        figure,
        "io-by-depth",
        f"Read rate by the number of requests in flight{told}; bars from the slowest to the "
        "fastest round.",
    )


def _draw_rates(axes: Any, points: dict[float, dict[str, Any]], name: str, number: int) -> None:
    rates = [row["gb_per_s"] for row in points.values()]
    errors = _errors(list(points.values()))
    axes.errorbar(list(points), rates, yerr=errors, label=name, capsize=2, **line_look(number))


def _errors(rows: Rows) -> tuple[list[float], list[float]]:
    return (
        [row["gb_per_s"] - row["slowest"] for row in rows],
        [row["fastest"] - row["gb_per_s"] for row in rows],
    )


def _decode_by_limit(rows: Rows) -> Plot | None:
    """Tokens a second of each engine under each limit, as groups of bars."""
    good = [row for row in rows if row.get("tokens_per_s") is not None]
    if not good:
        return None
    limits = list(dict.fromkeys(row["limit"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, (axes,) = make_figure(
        "Generation under memory limits", "memory limit", "tokens a second"
    )
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        of_arm = {row["limit"]: row for row in good if row["arm"] == arm}
        places = [i for i, limit in enumerate(limits) if limit in of_arm]
        middle = [of_arm[limits[i]]["tokens_per_s"] for i in places]
        low = [of_arm[limits[i]]["tokens_per_s"] - of_arm[limits[i]]["slowest"] for i in places]
        high = [of_arm[limits[i]]["fastest"] - of_arm[limits[i]]["tokens_per_s"] for i in places]
        offset = (number - (len(arms) - 1) / 2) * width
        bars = axes.bar(
            [i + offset for i in places],
            middle,
            width * 0.92,
            yerr=(low, high),
            capsize=2,
            label=arm,
            color=SHADES[number % len(SHADES)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
        )
        axes.bar_label(bars, labels=[f"{v:.1f}" for v in middle], fontsize=7, padding=2)
    axes.set_xticks(range(len(limits)), [limit_label(limit) for limit in limits])
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return finish_plot(
        figure,
        "decode-by-limit",
        "Tokens a second by memory limit of the whole process (share of the model's size); "
        "bars from the slowest to the fastest round.",
    )


def _hits_by_size(rows: Rows) -> Plot | None:
    """Hit rate of each policy by the share of the experts that fits."""
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        lines.setdefault(row["policy"], {})[row["share"]] = row["hit_rate"]
    if not lines:
        return None
    figure, (axes,) = make_figure("Hits by cache size", "room, % of all experts", "hit rate, %")
    for number, (policy, points) in enumerate(lines.items()):
        shares = sorted(points)
        style = line_look(number)
        if policy == "belady":
            style |= {"color": "black", "linestyle": "-", "marker": "", "linewidth": 2.2}
        label = "belady (knows the future)" if policy == "belady" else policy
        axes.plot(
            [100 * s for s in shares], [100 * points[s] for s in shares], label=label, **style
        )
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    legend_beside(axes)
    return finish_plot(
        figure,
        "hits-by-size",
        "Share of asked experts that were resident, by cache size and policy.",
    )
