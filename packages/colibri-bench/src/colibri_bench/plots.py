"""Results as pictures, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

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


def _last_phase(rows: Rows) -> Rows:
    """Readings of what had been read before, where there are any: one line for each engine."""
    return [row for row in rows if row.get("phase") == "re-read"] or rows


def _io_by_block_size(rows: Rows) -> Plot | None:
    """Throughput of each engine by block size, each at its best depth."""
    rows = _last_phase(rows)
    best: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row.get("gb_per_s") is None:
            continue
        of_engine = best.setdefault(_series(row), {})
        known = of_engine.get(row["block_bytes"])
        if known is None or row["gb_per_s"] > known["gb_per_s"]:
            of_engine[row["block_bytes"]] = row
    if not best:
        return None
    figure, (axes,) = make_figure("Read rate by block size", "block size", "GB/s (10^9 bytes)")
    for number, (name, points) in enumerate(best.items()):
        sizes = sorted(points)
        middle = [points[s]["gb_per_s"] for s in sizes]
        low = [points[s]["gb_per_s"] - points[s]["slowest"] for s in sizes]
        high = [points[s]["fastest"] - points[s]["gb_per_s"] for s in sizes]
        axes.errorbar(sizes, middle, yerr=(low, high), label=name, capsize=3, **line_look(number))
    _sizes_on_x(axes, sorted({s for points in best.values() for s in points}))
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return finish_plot(
        figure,
        "io-by-block-size",
        "Read rate of each way to read by block size, at its best queue depth; bars from the "
        "slowest to the fastest round.",
    )


def _io_by_depth(rows: Rows) -> Plot | None:
    """Throughput by queue depth for the engines that have one, one line an engine and size."""
    rows = _last_phase(rows)
    lines: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row.get("depth") and row.get("gb_per_s") is not None:
            key = (_series(row), row["block_bytes"])
            lines.setdefault(key, {})[row["depth"]] = row["gb_per_s"]
    lines = {key: points for key, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    figure, (axes,) = make_figure(
        "Read rate by queue depth", "requests in flight", "GB/s (10^9 bytes)"
    )
    for number, ((name, size), points) in enumerate(lines.items()):
        depths = sorted(points)
        label = f"{name}, {size_label(size)}"
        axes.plot(depths, [points[d] for d in depths], label=label, **line_look(number))
    depths = sorted({d for points in lines.values() for d in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return finish_plot(figure, "io-by-depth", "Read rate by the number of requests in flight.")


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


def _series(row: dict[str, Any]) -> str:
    phase = row.get("phase")
    return f"{row['engine']} ({phase})" if phase else str(row["engine"])


def _sizes_on_x(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_label(size) for size in sizes])
    axes.minorticks_off()
