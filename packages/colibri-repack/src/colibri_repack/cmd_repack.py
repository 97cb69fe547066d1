"""`colibri repack`: a checkpoint becomes a `.colibri` file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from colibri_format import format_size
from colibri_format.command import ends_like_interrupt

from .api import opened_imatrix, plan, repack
from .cmd_shared import (
    EXIT_OK,
    facts_rows,
    layer_rows,
    print_json,
    print_notes,
    print_rows,
    progress_bar,
    run,
    size_argument,
)
from .collector import without_collector
from .decoding import Fp8Form
from .families import AUTO, FAMILIES
from .kernel_layout import DEFAULT_LAYOUT, KernelLayout
from .memory_plan import DEFAULT_MEMORY
from .plan_advice import MIN_ALIGNMENT
from .quantise import Quant
from .repack_plan import RepackOptions
from .report import RepackReport
from .routing_trace import read_trace
from .striping import VolumeFolder
from .time_estimate import Estimate, estimate_time


def main(argv: Sequence[str] | None = None) -> int:
    """Repack as `argv` asks; 0 done, 1 data or I/O failure, 2 usage, 130 interrupted."""

    def body() -> int:
        with ends_like_interrupt():
            return _main(argv)

    return run(body)


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    source = arguments.source or arguments.input
    target = arguments.target or arguments.output
    if (arguments.source and arguments.input) or (arguments.target and arguments.output):
        parser.error("IN and OUT are given twice")
    if source is None or (target is None and not arguments.dry_run):
        parser.error("IN and OUT are required")
    output = Path(target or f"{Path(source).resolve().stem or 'model'}.colibri")
    return _repack(arguments, source, output)


def _repack(arguments: argparse.Namespace, source: str, output: Path) -> int:
    if arguments.dry_run:
        # The plan is gone again before the collector could look through it.
        with without_collector():
            report = _dry_run(arguments, source, output)
    else:
        with progress_bar("repacking", is_quiet=arguments.json) as progress:
            report = repack(
                source,
                output,
                quant=arguments.quant,
                dense_quant=arguments.dense_quant,
                may_requantise=arguments.allow_requantize,
                imatrix=arguments.imatrix,
                alignment=arguments.block_size,
                family=arguments.family,
                fp8=arguments.fp8,
                layout=arguments.layout,
                order=arguments.order,
                volumes=tuple(map(VolumeFolder.parse, arguments.volume)),
                memory_bytes=arguments.memory,
                overwrite=arguments.force,
                restart=arguments.restart,
                trust_source=arguments.trust_source,
                progress=progress,
            )
    if arguments.json:
        print_json(report.to_record())
    else:
        _print_report(report)
    return EXIT_OK


def _dry_run(arguments: argparse.Namespace, source: str, output: Path) -> RepackReport:
    with opened_imatrix(arguments.imatrix) as imatrix:
        options = RepackOptions(
            quant=Quant.of(arguments.quant),
            alignment=arguments.block_size,
            dense_quant=Quant.of(arguments.dense_quant) if arguments.dense_quant else None,
            may_requantise=arguments.allow_requantize,
            imatrix=imatrix,
            family=arguments.family,
            fp8=Fp8Form.of(arguments.fp8),
            layout=KernelLayout.of(arguments.layout),
            trace=None if arguments.order is None else read_trace(Path(arguments.order)),
            volumes=tuple(map(VolumeFolder.parse, arguments.volume)),
            memory_bytes=arguments.memory,
        )
        planned = plan(source, options)
        return RepackReport.of(planned, Path(source), output, estimate=estimate_time(planned))


def _print_report(report: RepackReport) -> None:
    rows = [*facts_rows(report.facts), *layer_rows(report.facts), ("quantisation", report.quant)]
    if report.seconds is not None and report.bytes_per_second is not None:
        rate = format_size(int(report.bytes_per_second))
        rows.append(("time", f"{report.seconds:.1f} s, {rate}/s"))
        rows.append(("reads, writes", _modes(report)))
        if report.converted is not None and report.converted.resumed_bytes:
            there = format_size(report.converted.resumed_bytes)
            rows.append(("gone on with", f"{there} of an interrupted run"))
        rows.append(("written to", str(report.output)))
    else:
        rows.append(("peak memory", f"at most {format_size(report.peak_memory_bytes)}"))
        if report.estimate is not None:
            rows.append(("time", f"about {_duration(report.estimate)}"))
        rows.append(("written to", "nothing: --dry-run"))
    print_rows(rows)
    print_notes(report.notes, report.warnings)


def _duration(found: Estimate) -> str:
    seconds = max(round(found.seconds), 1)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    text = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"
    return f"{text if seconds >= 60 else f'{seconds} s'}, given {found.basis}"


def _modes(report: RepackReport) -> str:
    if report.converted is None:
        return "none"
    modes = report.converted.read_mode, report.converted.write_mode
    return ", ".join(mode if mode == "direct" else f"{mode} ({why})" for mode, why in modes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri repack",
        description="Write a GGUF file or a Hugging Face folder as one .colibri file.",
    )
    parser.add_argument("source", nargs="?", metavar="IN", help="GGUF file, folder or safetensors")
    parser.add_argument("target", nargs="?", metavar="OUT", help="the .colibri file to write")
    parser.add_argument("--input", metavar="IN", help="the same as IN")
    parser.add_argument("--output", metavar="OUT", help="the same as OUT")
    parser.add_argument(
        "--block-size",
        type=size_argument,
        default=MIN_ALIGNMENT,
        metavar="SIZE",
        help="bytes each expert's block starts a multiple of: 4096 (default) to 2M, as 16K",
    )
    parser.add_argument(
        "--quant",
        choices=[quant.value for quant in Quant],
        default=Quant.KEEP.value,
        help="what matrices become: every byte as it is (default), one type, or llama.cpp's mixes "
        "q4_k_m and q5_k_m; router and norms stay F32",
    )
    parser.add_argument(
        "--dense-quant",
        choices=[quant.value for quant in Quant],
        metavar="QUANT",
        help="the same for the dense tensors, which every token needs; default: as --quant",
    )
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="quantise again what is quantised already, at a loss",
    )
    parser.add_argument(
        "--imatrix", metavar="FILE", help="importance matrix of llama.cpp, of either form"
    )
    parser.add_argument(
        "--fp8",
        choices=[form.value for form in Fp8Form],
        default=Fp8Form.BF16.value,
        help="what FP8 weights with block scales become: bf16 (default), f32, or kept as they are",
    )
    parser.add_argument(
        "--layout",
        choices=[layout.value for layout in KernelLayout],
        default=DEFAULT_LAYOUT.value,
        help="how quantised matrices stand: plain rows as in GGUF, x16 with 16 rows interleaved, "
        "auto as the native kernels read each type fastest; the numbers are the same, and export "
        f"gives plain rows back; default: {DEFAULT_LAYOUT.value}",
    )
    parser.add_argument(
        "--order",
        metavar="TRACE",
        help="put experts that fire together side by side, those that fire often first, as this "
        "recorded routing trace (CSV or Parquet) has it; default: by their numbers",
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="DIR[:WEIGHT]",
        help="a folder, one a disk, that gets a volume file with its share of the blocks, dealt "
        "in turn; twice the share with :2; may be repeated",
    )
    parser.add_argument(
        "--family",
        choices=[AUTO, *(family.name for family in FAMILIES)],
        metavar="NAME",
        help="the family's table to use instead of the one the source names; auto recognises "
        "experts of unknown families by names and shapes, and prints the mapping",
    )
    parser.add_argument(
        "--memory",
        type=size_argument,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="what the process may hold in memory at most, everything counted, as 256M; default: "
        f"{format_size(DEFAULT_MEMORY)}",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="give up what an interrupted run left (OUT.part and its journal) and begin anew; "
        "default: go on with it if source and options are the same, else refuse",
    )
    parser.add_argument(
        "--trust-source",
        action="store_true",
        help="go on even though input files have other times or inodes than then: their content "
        "is certainly the same",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object, no progress")
    return parser
