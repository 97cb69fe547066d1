"""`colibri run`: generates text from a `.colibri` file inside a memory budget."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from colibri_format import ModelSpec, UsageError
from colibri_format.command import EXIT_INTERRUPTED, EXIT_OK, run_command

from .cmd_run_options import make_config, make_parser
from .config import RunConfig
from .errors import BudgetError
from .figures import Phase, profile_rows
from .live import LiveLines
from .run_report import RunReport, plan_rows
from .stats import LayerStats

if TYPE_CHECKING:
    from .budget import MemoryPlan
    from .decoder import RoutingObserver
    from .runtime import Runtime
    from .sampler import SamplingSpec
    from .tokenizer import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs as `argv` asks: 0 done, 1 data or I/O failure, 2 usage, 130 interrupted."""
    return run_command(lambda: _main(argv), usage=(UsageError, BudgetError))


def _main(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.prompt is None and not arguments.dry_run:
        parser.error("--prompt is required, unless it is a --dry-run")
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    import colibri_format

    from .runtime import read_model
    from .sampler import SamplingSpec

    config = make_config(arguments)
    sampling = SamplingSpec(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    if sampling.temperature == 0 and (
        arguments.top_k or arguments.top_p < 1 or arguments.seed is not None
    ):
        print(
            "note: --top-k, --top-p and --seed have no effect at --temperature 0, which takes the "
            "likeliest token",
            file=sys.stderr,
        )
    if arguments.max_tokens < 1:
        raise UsageError("bad-option", "--max-tokens", f"is {arguments.max_tokens}", "at least 1")
    with colibri_format.open(
        arguments.file, verify=config.is_verified, volumes=arguments.volume
    ) as reader:
        model = read_model(reader)
        prompt: list[int] = []
        tokenizer = None
        if arguments.prompt is not None:
            from .generate import prompt_tokens
            from .tokenizer import load_tokenizer

            tokenizer = load_tokenizer(reader)
            prompt = prompt_tokens(tokenizer, _prompt(arguments.prompt), model.bos_token)
            config = _with_context(config, model, len(prompt), arguments)
        if arguments.dry_run or tokenizer is None:
            return _dry_run(reader, model, config, is_json=arguments.json)
        return _generate(_Job(arguments, config, sampling, model, tokenizer, prompt), reader)


def _prompt(text: str) -> str:
    """The prompt as given, or all of stdin for `-`.

    Raises:
        UsageError: `bad-prompt` when it is no valid Unicode.
    """
    try:
        prompt = sys.stdin.read().removesuffix("\n") if text == "-" else text
        prompt.encode()
    except UnicodeError as error:
        raise UsageError(
            "bad-prompt", "prompt", f"is no valid text ({error})", "text in UTF-8"
        ) from error
    return prompt


def _with_context(
    config: RunConfig, model: ModelSpec, n_prompt: int, arguments: argparse.Namespace
) -> RunConfig:
    """The configuration with a context that holds prompt and continuation.

    Raises:
        UsageError: `prompt-too-long` when the prompt alone does not fit.
    """
    limit = config.context or model.context_length
    if n_prompt > limit:
        whose = "--context" if config.context else "the model"
        raise UsageError(
            "prompt-too-long",
            arguments.file,
            f"the prompt has {n_prompt} tokens",
            f"{whose} allows {limit}",
            "shorten the prompt" + (" or give a longer --context" if config.context else ""),
        )
    if config.context is not None:
        return config
    return replace(config, context=min(limit, n_prompt + arguments.max_tokens))


def _dry_run(reader: Any, model: ModelSpec, config: RunConfig, *, is_json: bool) -> int:
    from .choices import choose_context, make_backend
    from .runtime import describe_needs, open_history, plan_run

    needs = describe_needs(reader, model, make_backend(config), config)
    plan = plan_run(needs, config, history=open_history(reader, config))
    context = choose_context(model, config.context, str(reader.path))
    if is_json:
        print(json.dumps({"plan": plan.as_dict(), "context": context}, indent=1))
        return EXIT_OK
    _print_pairs([*plan_rows(plan), ("context", f"{context} positions")], sys.stdout)
    _print_notes(plan.notes)
    return EXIT_OK


@dataclass(slots=True)
class _Job:
    """A run that was asked for, and what came of it so far."""

    arguments: argparse.Namespace
    config: RunConfig
    sampling: SamplingSpec
    model: ModelSpec
    tokenizer: Tokenizer
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    stop: str = "interrupted"
    started: float = 0.0
    first: float | None = None
    ended: float = 0.0
    at_first: LayerStats = field(default_factory=LayerStats)


def _generate(job: _Job, reader: Any) -> int:
    from . import machine
    from .cmd_progress import ProgressBars
    from .decoder import Observers
    from .runtime import Runtime

    arguments = job.arguments
    _warm_up()
    # Loading a tokenizer takes, for a moment, more than it keeps: that is no part of the run.
    machine.reset_peak_rss()
    baseline = machine.rss_bytes()
    load_started = time.perf_counter()
    bars = ProgressBars(
        len(job.prompt), job.model.n_layers, is_shown=False if arguments.json else None
    )
    with ExitStack() as stack:
        stack.enter_context(bars)
        observer: RoutingObserver = bars
        if arguments.trace is not None:
            from .trace_recorder import TraceRecorder

            # Before the model is loaded, so that a name that cannot be written fails at once.
            recorder = TraceRecorder(arguments.trace, n_prompt=len(job.prompt))
            observer = Observers(bars, stack.enter_context(recorder))
        runtime = stack.enter_context(
            Runtime(reader, job.config, progress=bars.loaded, observer=observer)
        )
        load_seconds = time.perf_counter() - load_started
        if arguments.memory is None and not arguments.json:
            _print_budget(runtime.plan)
        status = EXIT_OK
        try:
            _stream(job, runtime)
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
        runtime.save_history()
        job.ended = job.ended or time.perf_counter()
        report = _report(job, runtime, baseline, machine.peak_rss_bytes(), load_seconds)
    if arguments.json:
        print(json.dumps(report.record(with_layers=arguments.profile), indent=1))
    else:
        _print_report(report, with_layers=arguments.profile)
    return status


def _warm_up() -> None:
    """Has NumPy load and allocate what is its own: the library's memory, not the model's."""
    import numpy as np

    square = np.ones((256, 256), np.float32)
    np.matmul(square, square)
    np.matmul(square, square[0])
    # numpy.random is loaded when it is first asked for, and its extensions take 4 MB.
    np.random.default_rng(0).random()


def _stream(job: _Job, runtime: Runtime) -> None:
    """Generates, and puts text on stdout as it comes unless one JSON object is asked for."""
    from .generate import generate
    from .sampler import Sampler

    store = runtime.store
    job.started = time.perf_counter()
    pieces = generate(
        runtime.decoder,
        job.tokenizer,
        job.prompt,
        Sampler(job.sampling),
        max_tokens=job.arguments.max_tokens,
        eos_tokens=job.model.eos_tokens,
    )
    out = _writer(is_quiet=job.arguments.json)
    live = LiveLines(store.stats.total) if job.arguments.live else None
    try:
        for piece in pieces:
            job.ended = time.perf_counter()
            if job.first is None:
                job.first = job.ended
                job.at_first = store.stats.total()
            job.tokens.append(piece.token)
            job.text.append(piece.text)
            out(piece.text)
            for line in live.token() if live is not None else ():
                print(line, file=sys.stderr)
            if piece.stop is not None:
                job.stop = piece.stop.value
    finally:
        if job.text and not "".join(job.text).endswith("\n"):
            out("\n")


def _writer(*, is_quiet: bool) -> Callable[[str], None]:
    if is_quiet:
        return lambda text: None
    encoding = sys.stdout.encoding or "utf-8"

    def write(text: str) -> None:
        # A terminal may not know every character that a model does.
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    return write


def _report(
    job: _Job, runtime: Runtime, baseline: int | None, peak: int | None, load_seconds: float
) -> RunReport:
    store = runtime.store
    first = job.first or job.ended
    total = store.stats.total()
    at_first = job.at_first if job.first is not None else total
    return RunReport(
        prompt=job.prompt,
        tokens=job.tokens,
        text="".join(job.text),
        stop=job.stop,
        prefill=Phase(_n_read(job, runtime), first - job.started, at_first),
        decode=Phase(max(0, len(job.tokens) - 1), job.ended - first, total.minus(at_first)),
        layers=store.stats.layers,
        passes=store.passes.recent,
        plan=runtime.plan,
        config=runtime.config,
        io=store.io_report,
        gate=store.passes.gate,
        pool=store.pool.report(),
        backend=runtime.backend.name,
        backend_summary=getattr(runtime.backend, "summary", runtime.backend.name),
        backend_notes=getattr(runtime.backend, "notes", ()),
        context=runtime.context,
        baseline_rss_bytes=baseline,
        peak_rss_bytes=peak,
        load_seconds=load_seconds,
        warnings=runtime.reader.warnings,
    )


def _n_read(job: _Job, runtime: Runtime) -> int:
    """Tokens of the prompt that passed the model: not all of them after an interruption."""
    if job.first is not None:
        return len(job.prompt)
    return min(len(job.prompt), runtime.kv_cache.length)


def _print_budget(plan: MemoryPlan) -> None:
    from colibri_format import format_size

    text = (
        f"no --memory given: a budget of {format_size(plan.budget_bytes)} was chosen; it holds "
        f"{plan.n_slots} of {plan.n_blocks} experts"
    )
    print(text, file=sys.stderr)


def _print_report(report: RunReport, *, with_layers: bool) -> None:
    print(file=sys.stderr)
    _print_pairs(report.rows(), sys.stderr)
    if with_layers:
        rows = profile_rows(report.layers)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        print(file=sys.stderr)
        for row in rows:
            cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells), file=sys.stderr)
    for sentence in report.advice:
        print(f"stall: {sentence}", file=sys.stderr)
    _print_notes(report.notes)


def _print_pairs(rows: Sequence[tuple[str, str]], file: Any) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}", file=file)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
