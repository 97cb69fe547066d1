"""Pictures of a token's timeline: spans in lanes, and sums as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .picture import SHADES, Plot, Rows, finish_plot, legend_beside, limit_label, make_figure
from .token_time import SHARES

# Dark where the processor computes, light where it does something else, white where it waits.
_LOOKS: Final = {
    "attention": (SHADES[0], ""),
    "experts": (SHADES[1], "///"),
    "router": ("#c2a5cf", ""),
    "dense": ("#66c2a5", "\\\\\\"),
    "check": ("#e6ab02", "..."),
    "wait": ("#ffffff", "xxxx"),
    "other": ("#bbbbbb", ""),
}
_LANES: Final = (("attention", "router", "dense"), ("experts",), ("check",), ("wait",))
_N_ZOOMED: Final = 3
_MOST_LIMITS: Final = 12


def plot_timelines(rows: Rows) -> list[Plot]:
    """For each limit its token, whole and some layers of it enlarged; no rows, no pictures."""
    limits = list(dict.fromkeys(row["limit"] for row in rows))[:_MOST_LIMITS]
    return [_timeline(limit, [r for r in rows if r["limit"] == limit]) for limit in limits]


def plot_sums(totals: Sequence[dict[str, Any]]) -> Plot | None:
    """Where a token's time goes under each limit, as one bar a limit."""
    if not totals:
        return None
    figure, (axes,) = make_figure("Where a token's time goes", "ms a token", "memory limit")
    axes.grid(visible=False)
    starts = [0.0] * len(totals)
    for kind in SHARES:
        widths = [max(0.0, one[kind]) for one in totals]
        shade, hatch = _LOOKS[kind]
        axes.barh(
            range(len(totals)), widths, 0.7, starts, color=shade, hatch=hatch, label=kind,
            edgecolor="black" if kind == "wait" else "white", linewidth=0.5,
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, (end, one) in enumerate(zip(starts, totals, strict=True)):
        axes.text(end, place, f"  {one['total']:.0f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(totals)), [limit_label(one["limit"]) for one in totals])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    legend_beside(axes)
    return finish_plot(
        figure,
        "token-time",
        "Means over tokens. wait: compute had no block to go on with; check: checksums of blocks "
        "that came; other: the store's bookkeeping.",
    )


def _timeline(limit: str, rows: Rows) -> Plot:
    figure, panels = make_figure(
        f"One token, memory limit: {limit_label(limit)}", "ms since the token began", "", n_rows=2
    )
    reads = [row for row in rows if row["kind"] == "read"]
    heights = _stack(reads)
    for axes in panels:
        _draw(axes, rows, reads, heights)
    whole, part = panels
    end = max(row["end_ms"] for row in rows)
    whole.set_xlim(min(0.0, *(row["start_ms"] for row in rows)), end)
    left, right = _zoom(rows)
    part.set_xlim(left, right)
    whole.axvspan(left, right, color="#eeeeee", zorder=0)
    for layer, start in _layer_starts(rows).items():
        if left <= start < right:
            part.text(
                start, 1.01, f"layer {layer}", fontsize=7, transform=part.get_xaxis_transform()
            )
    legend_beside(whole)
    name = "".join(c if c.isalnum() else "-" for c in limit[:40]).strip("-")
    return finish_plot(
        figure,
        f"timeline-{name}",
        f"The token of median length under the limit {limit_label(limit)}; below, some of its "
        "layers enlarged (shaded above). Reads stand above each other as they are under way "
        "together; all else is the computing thread's. Lines are the layers' beginnings.",
    )


def _draw(axes: Any, rows: Rows, reads: Rows, heights: Sequence[int]) -> None:
    n_high = max(heights, default=0) + 1
    present = {row["kind"] for row in rows}
    lanes = [kinds for kinds in _LANES if present & set(kinds)]
    base = len(lanes)
    for lane, kinds in enumerate(lanes):
        for kind in kinds:
            spans = [
                (r["start_ms"], r["end_ms"] - r["start_ms"]) for r in rows if r["kind"] == kind
            ]
            if spans:
                shade, hatch = _LOOKS[kind]
                # Spans may be a pixel wide: edges and hatches in white would hide them.
                axes.broken_barh(
                    spans, (lane - 0.38, 0.76), facecolors=shade, label=kind, linewidth=0.3,
                    hatch=hatch if kind == "wait" else "",
                    edgecolor="black" if kind == "wait" else shade,
                )  # fmt: skip
    step = 1.6 / n_high
    for is_ahead, shade, label in ((False, "#555555", "read"), (True, "#bbbbbb", "read ahead")):
        for place in range(n_high):
            spans = [
                (r["start_ms"], r["end_ms"] - r["start_ms"])
                for r, height in zip(reads, heights, strict=True)
                if height == place and bool(r.get("is_prefetch")) == is_ahead
            ]
            if spans:
                axes.broken_barh(
                    spans, (base - 0.4 + step * place, step * 0.85), facecolors=shade, label=label,
                    edgecolor="white", linewidth=0.3,
                )  # fmt: skip
    names = [",\n".join(kind for kind in kinds if kind in present) for kinds in lanes]
    axes.set_yticks([*range(base), base + 0.4], [*names, "reads"])
    axes.set_ylim(-0.6, base + 1.4)
    axes.grid(visible=False)
    for start in _layer_starts(rows).values():
        axes.axvline(start, color="#999999", linewidth=0.4)


def _stack(reads: Rows) -> list[int]:
    """The lowest place for each read in which none is under way when it begins."""
    ends: list[float] = []
    places = []
    for row in reads:
        place = next((i for i, end in enumerate(ends) if end <= row["start_ms"]), len(ends))
        ends[place : place + 1] = [row["end_ms"]]
        places.append(place)
    return places


def _layer_starts(rows: Rows) -> dict[int, float]:
    starts: dict[int, float] = {}
    for row in rows:
        if row["kind"] != "read" and row.get("layer") is not None:
            starts.setdefault(row["layer"], row["start_ms"])
    return starts


def _zoom(rows: Rows) -> tuple[float, float]:
    """From the beginning of a layer in the middle to the end of the second after it."""
    starts = sorted(_layer_starts(rows).values())
    end = max(row["end_ms"] for row in rows)
    if len(starts) <= _N_ZOOMED:
        return 0.0, end
    first = len(starts) // 2
    last = first + _N_ZOOMED
    return starts[first], starts[last] if last < len(starts) else end
