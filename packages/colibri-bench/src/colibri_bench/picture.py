"""Pictures: a figure with labelled axes, readable in grey, as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from colibri_format import UsageError

Rows = Sequence[dict[str, Any]]

# Told apart by shape and line as well as by shade, so that a grey print can be read.
MARKERS: Final = "osD^vPX*"
LINES: Final = ("-", "--", "-.", ":")
HATCHES: Final = ("", "///", "...", "xx", "\\\\\\", "++")
SHADES: Final = ("#0b3c5d", "#d95f02", "#1b9e77", "#7b3294", "#555555", "#e6ab02", "#a6761d")
_SIZE: Final = (8.0, 4.8)


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture: its file name without ending, its caption, PNG and SVG bytes."""

    name: str
    caption: str
    png: bytes
    svg: bytes


def make_figure(
    title: str, x_label: str, y_label: str, *, n_rows: int = 1, n_columns: int = 1
) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, row by row.

    Raises:
        UsageError: `no-matplotlib`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "no-matplotlib", "plots", "matplotlib is not installed", "the extra `plot`",
            "pip install 'colibri-bench[plot]'",
        ) from error  # fmt: skip
    width, height = _SIZE
    figure = Figure(figsize=(width, height if n_rows == 1 else 3.2 * n_rows), layout="constrained")
    FigureCanvasAgg(figure)
    n = n_rows * n_columns
    panels = [figure.add_subplot(n_rows, n_columns, number + 1) for number in range(n)]
    if n_columns > 1:
        figure.suptitle(_plain(title), fontsize=11, x=0.01, ha="left")
    else:
        panels[0].set_title(_plain(title), fontsize=11, loc="left")
    for axes in panels:
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, panels


def finish_plot(figure: Any, name: str, caption: str) -> Plot:
    """The picture of a figure; the same results give the same bytes."""
    from matplotlib import rc_context

    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    # Else it holds a date and random names.
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return Plot(name, caption, png.getvalue(), svg.getvalue())


def line_look(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of line `number`."""
    return {
        "color": SHADES[number % len(SHADES)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "markersize": 5,
        "linewidth": 1.4,
    }


def legend_beside(axes: Any) -> None:
    """Outside the axes, where it covers no data; each name once."""
    handles, names = axes.get_legend_handles_labels()
    found = dict(zip(names, handles, strict=True))
    axes.legend(
        found.values(), map(_plain, found), loc="upper left", bbox_to_anchor=(1.01, 1.0),
        frameon=False, fontsize=8,
    )  # fmt: skip


def size_label(size_bytes: int) -> str:
    """`64 KiB`, `3.5 MiB`."""
    if size_bytes < 2**20:
        return f"{size_bytes / 1024:g} KiB"
    return f"{size_bytes / 2**20:.3g} MiB"


def limit_label(limit: str) -> str:
    """`no limit`, or the limit as it was given."""
    return "no limit" if limit == "none" else _plain(limit)


def _plain(text: str) -> str:
    """Text that is not taken for mathematics, which a stray dollar sign begins."""
    return text.replace("$", r"\$")
