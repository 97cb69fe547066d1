"""The options of `colibri run`, and the configuration they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path

from colibri_format import ColibriError, parse_size

from .config import KV_DTYPE_NAMES, RunConfig
from .disk import EngineName
from .disk_mmap import DEFAULT_MMAP_THREADS
from .disk_queue import DEPTH_BYTES, LEAST_DEPTH
from .disk_threads import DEFAULT_IO_THREADS
from .history import history_path
from .policies import POLICY_NAMES
from .policy_hybrid import LFU_WEIGHT
from .prefetch import MAX_LOOK_AHEAD, PrefetchSource


def make_config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that parsed options ask for.

    Raises:
        UsageError: `bad-option` naming the first out of its range.
    """
    return RunConfig(
        memory_bytes=arguments.memory,
        cache_bytes=arguments.cache_size,
        context=arguments.context,
        prefetch_depth=arguments.prefetch_depth,
        prefetch_from=arguments.prefetch_from,
        policy=arguments.policy,
        lfu_weight=arguments.lfu_weight,
        history=_history(arguments),
        io=arguments.io,
        io_threads=arguments.io_threads,
        io_depth=arguments.io_depth,
        batch_size=arguments.batch_size,
        is_verified=not arguments.no_verify,
        backend=arguments.backend,
        threads=arguments.threads,
        kv_dtype=arguments.kv_dtype,
    )


def _history(arguments: argparse.Namespace) -> Path | None:
    if arguments.history == "off":
        return None
    return history_path(arguments.file) if arguments.history == "on" else Path(arguments.history)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ColibriError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _depth(text: str) -> int | None:
    return None if text == "auto" else int(text)


def make_parser() -> argparse.ArgumentParser:
    """The parser of `colibri run`, whose help states every default."""
    defaults = RunConfig()
    parser = argparse.ArgumentParser(
        prog="colibri run",
        description="Generate text from a .colibri file. Text goes to stdout as it comes, figures "
        "to stderr.",
    )
    parser.add_argument("file", metavar="FILE", help="the .colibri file")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="what to continue; - reads it from stdin, without its last line end; "
        "--prompt=-x for one that begins with -",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="the budget, a hard ceiling, as 512M or 6G; default: what all experts need, within "
        "80%% of the memory available",
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="positions that the KV cache holds; default: prompt and --max-tokens",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 (default) takes the likeliest token",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest; 0: all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest that together reach P; default: 1",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument(
        "--cache-size",
        type=_size,
        metavar="SIZE",
        help="the most of --memory that cached experts take; default: all that is left of it",
    )
    parser.add_argument(
        "--prefetch-depth",
        type=_depth,
        default=defaults.prefetch_depth,
        metavar="N",
        help=f"layers ahead whose experts are read before they are asked for, 0 to "
        f"{MAX_LOOK_AHEAD}, or auto (default): tokens with and without take turns now and then, "
        "and what was faster is kept",
    )
    parser.add_argument(
        "--prefetch-from",
        choices=list(PrefetchSource),
        default=defaults.prefetch_from,
        help="what foresees them: the next layer's router (default), what the layer asked for "
        "last, or what it asked for most",
    )
    parser.add_argument(
        "--policy",
        choices=POLICY_NAMES,
        default=defaults.policy,
        help="which experts leave the cache first; default: %(default)s",
    )
    parser.add_argument(
        "--lfu-weight",
        type=float,
        metavar="W",
        help=f"of --policy hybrid, from 0 (last use counts) to 1 (frequency counts); default: "
        f"{LFU_WEIGHT}",
    )
    parser.add_argument(
        "--history",
        default="off",
        metavar="PATH",
        help="keep counts of which experts are asked for in PATH, or, with on, beside FILE, and "
        "begin with the experts that were asked for most; default: off",
    )
    parser.add_argument(
        "--io",
        choices=list(EngineName),
        default=defaults.io,
        help="how the disk is read; auto (default) takes the first of uring, aio and threads that "
        "is shown to read past the page cache",
    )
    parser.add_argument(
        "--io-threads",
        type=int,
        metavar="N",
        help=f"threads that read, of threads (default: {DEFAULT_IO_THREADS}) and mmap (default: "
        f"{DEFAULT_MMAP_THREADS})",
    )
    parser.add_argument(
        "--io-depth",
        type=int,
        metavar="N",
        help=f"reads in flight, of uring and aio; default: {LEAST_DEPTH}, or what makes "
        f"{DEPTH_BYTES >> 20} MiB of smaller blocks",
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="FOLDER",
        help="where else to look for the volumes of a striped file; may be given several times",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=defaults.batch_size,
        metavar="N",
        help="prompt tokens that pass the layers together; default: up to 512, as memory allows",
    )
    parser.add_argument(
        "--backend",
        default=defaults.backend,
        help="native, numpy, or another that is installed; default: native where its library "
        "could be built",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads that compute; default: at most 2"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=sorted(KV_DTYPE_NAMES),
        help="of keys and values; default: f16 where the backend is native",
    )
    parser.add_argument("--no-verify", action="store_true", help="leave out checksums")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the memory plan and do not run"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write down which experts each token chose, for colibri simulate: CSV, or Parquet "
        "where the name ends in .parquet",
    )
    parser.add_argument("--profile", action="store_true", help="what each layer did")
    parser.add_argument(
        "--live", action="store_true", help="a line of figures on stderr every second"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser
