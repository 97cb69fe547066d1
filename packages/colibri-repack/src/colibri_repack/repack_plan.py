"""What a repack will write and from where, decided from metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from colibri_format import (
    MODEL_FILE,
    FilePlan,
    FileSpec,
    Layout,
    Role,
    SegmentSpec,
    TensorSpec,
    plan_layout,
)

from .decoding import Fp8Form
from .errors import RepackError
from .expert_order import plan_order
from .families import Checkpoint, DenseWeight
from .imatrix import Imatrix
from .kernel_layout import DEFAULT_LAYOUT, KernelLayout
from .memory_plan import (
    DEFAULT_MEMORY,
    PER_PART_BYTES,
    WORKING_BYTES,
    MemoryNeeds,
    MemoryPlan,
    plan_memory,
)
from .part_plan import Conversion, Part, PartPlanner, some
from .pieces import unit_tile_bytes
from .plan_advice import MIN_ALIGNMENT, index_advice, padding_advice, uses_of
from .quantise import Quant
from .recode import default_threads, is_slow
from .routing_trace import PER_CHOICE_BYTES, RoutingTrace
from .sources import EmbeddedFile, Source
from .striping import VolumeFolder, plan_volumes, volume_labels

# Measured, rounded up: a parsed and encoded vocabulary by the bytes of its file.
_PER_EMBEDDED_BYTE: Final = 10
# NumPy in the place of the C library: float32 and what its searches make of them, a thread.
_NUMPY_BYTES: Final = 24 * 2**20


@dataclass(frozen=True, slots=True)
class RepackOptions:
    """`quant`: what becomes of matrices; `alignment`: bytes each block starts a multiple of.

    `dense_quant`: the same for dense tensors, None for as `quant`. `may_requantise`: whether
    quantised matrices may be quantised again. `imatrix`: open importance matrix.
    `family`: a family's name or `auto`, None for what the source says; `fp8`: what weights with
    FP8 block scales become; `layout`: how matrices stand. `trace`: experts that it shows firing
    together stand side by side, None for the order of their numbers; `volumes`: folders for the
    blocks, none for one file. `memory_bytes`: what the process may have resident at most.
    """

    quant: Quant = Quant.KEEP
    alignment: int = MIN_ALIGNMENT
    dense_quant: Quant | None = None
    may_requantise: bool = False
    imatrix: Imatrix | None = None
    family: str | None = None
    fp8: Fp8Form = Fp8Form.BF16
    layout: KernelLayout = DEFAULT_LAYOUT
    trace: RoutingTrace | None = None
    volumes: tuple[VolumeFolder, ...] = ()
    memory_bytes: int = DEFAULT_MEMORY

    @property
    def volume_paths(self) -> tuple[Path, ...]:
        """The folder of each volume."""
        return tuple(folder.path for folder in self.volumes)


@dataclass(frozen=True, slots=True)
class TensorJob:
    """Write a dense tensor."""

    name: str
    part: Part


@dataclass(frozen=True, slots=True)
class FileJob:
    """Write an embedded file."""

    file: EmbeddedFile


class BlockJob(NamedTuple):
    """Write an expert's block, its parts in order of role."""

    layer: int
    expert: int
    parts: tuple[Part, ...]


Job = TensorJob | FileJob | BlockJob


@dataclass(frozen=True, slots=True, eq=False)
class RepackPlan:
    """A whole repack: every extent of the output, and the jobs in the order of the output.

    `kinds` are all parts in groups: one of each, and how many there are that differ from it in
    nothing but their place and importance. `payload_bytes` is what the jobs write together,
    padding left out.
    """

    checkpoint: Checkpoint
    options: RepackOptions
    file: FilePlan
    jobs: tuple[Job, ...]
    kinds: tuple[tuple[Part, int], ...]
    payload_bytes: int
    memory: MemoryPlan
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def peak_memory_bytes(self) -> int:
        """What the process has resident at most."""
        return self.memory.total_bytes

    @property
    def embedded(self) -> Iterator[EmbeddedFile]:
        """Every embedded file that is written."""
        return (job.file for job in self.jobs if isinstance(job, FileJob))

    @property
    def parts(self) -> Iterator[Part]:
        """Every slice that is written."""
        for job in self.jobs:
            if isinstance(job, BlockJob):
                yield from job.parts
            elif isinstance(job, TensorJob):
                yield job.part


def plan_repack(source: Source, checkpoint: Checkpoint, options: RepackOptions) -> RepackPlan:
    """The plan that brings `checkpoint`, read from `source`, into one `.colibri` file.

    Touches no file.

    Raises:
        RepackError: `requantize` when quantised tensors would be quantised again, `mixed-layer`
            when experts of one layer differ in their encodings, `imatrix-size`.
        SourceError: `trace-mismatch`.
        MemoryBudgetError: `budget-too-small`.
        UsageError, FormatError: as `colibri_format.plan_layout` (`bad-alignment`, ...).
    """
    parts_planner = PartPlanner(
        checkpoint,
        options.quant,
        options.quant if options.dense_quant is None else options.dense_quant,
        may_requantise=options.may_requantise,
        imatrix=options.imatrix,
        layout=options.layout,
    )
    dense = [
        (weight, parts_planner.dense(weight.name, weight.layer, weight.part))
        for weight in checkpoint.dense
    ]
    blocks: list[BlockJob] = []
    layouts: list[Layout | None] = []
    kinds = [(part, 1) for _, part in dense]
    for layer, experts in enumerate(checkpoint.experts):
        if experts is None:
            layouts.append(None)
            continue
        runs = {
            role: parts_planner.experts(layer, role, column)
            for role, column in experts.columns.items()
        }
        kinds += [(run[0], len(run)) for column in runs.values() for run in column]
        layouts.append(_layer_layout(f"{source.path}: layer {layer}", runs))
        rows = zip(*(chain.from_iterable(column) for column in runs.values()), strict=True)
        blocks += [BlockJob(layer, expert, parts) for expert, parts in enumerate(rows)]
    embedded = (*_model_files(checkpoint), *source.embedded)
    order = None
    if options.trace is not None:
        order = plan_order(options.trace, checkpoint.n_layers, checkpoint.n_experts)
    block_volumes = None
    if options.volumes:
        has_experts = np.array([layout is not None for layout in layouts])
        shape = (checkpoint.n_layers, checkpoint.n_experts)
        block_volumes = plan_volumes(
            np.broadcast_to(np.arange(shape[1]), shape) if order is None else order,
            np.broadcast_to(has_experts[:, None], shape),
            [folder.weight for folder in options.volumes],
        )
    file = plan_layout(
        n_layers=checkpoint.n_layers,
        n_experts=checkpoint.n_experts,
        layer_layouts=layouts,
        tensors=[_tensor_spec(weight, part) for weight, part in dense],
        files=[FileSpec(file.name, file.size) for file in embedded],
        metadata=_metadata(source, checkpoint, options, kinds),
        volumes=volume_labels(len(options.volumes)),
        block_volumes=block_volumes,
        block_order=order,
        alignment=options.alignment,
    )
    jobs = _in_file_order(file, dense, embedded, blocks)
    notes = list(source.notes) + list(checkpoint.notes) + parts_planner.notes()
    if checkpoint.dropped:
        notes.append(f"left out, engines compute it: {some(checkpoint.dropped)}")
    embedded_bytes = sum(item.size for item in embedded)
    trace_bytes = 0 if options.trace is None else PER_CHOICE_BYTES * len(options.trace.expert)
    needs = _memory_needs(file, kinds, embedded_bytes, trace_bytes)
    return RepackPlan(
        checkpoint=checkpoint,
        options=options,
        file=file,
        jobs=jobs,
        kinds=tuple(kinds),
        payload_bytes=embedded_bytes + sum(n * part.size for part, n in kinds),
        memory=plan_memory(options.memory_bytes, needs, default_threads()),
        notes=tuple(notes),
        warnings=(*_warnings(file), *_missing_tokenizer(source, embedded)),
    )


def _memory_needs(
    file: FilePlan, kinds: Sequence[tuple[Part, int]], embedded_bytes: int, trace_bytes: int
) -> MemoryNeeds:
    parts = [part for part, _ in kinds]
    recoded = [part for part in parts if part.conversion is Conversion.RECODE]
    return MemoryNeeds(
        fixed_bytes=WORKING_BYTES
        + _PER_EMBEDDED_BYTE * embedded_bytes
        + trace_bytes
        + PER_PART_BYTES * sum(n for _, n in kinds)
        + 2 * file.index_bytes,
        n_files=1 + len(file.volumes),
        is_recoding=bool(recoded),
        is_decoding=any(part.source.decoder for part in parts),
        is_interleaving=any(part.row_interleave for part in parts),
        least_tile_bytes=max((unit_tile_bytes(part) for part in parts), default=0),
        worker_bytes=_NUMPY_BYTES if recoded and is_slow() else 0,
    )


def _layer_layout(where: str, runs: Mapping[Role, Sequence[Sequence[Part]]]) -> Layout:
    """The layout of a layer's blocks; of each role there are runs of parts that are alike."""
    specs = {
        role: [
            SegmentSpec(role, run[0].dtype, run[0].source.shape, run[0].row_interleave)
            for run in column
        ]
        for role, column in runs.items()
    }
    for role, found in specs.items():
        expert = 0
        for run, spec in zip(runs[role], found, strict=True):
            if spec != found[0]:
                raise RepackError(
                    "mixed-layer",
                    where,
                    f"{role.name.lower()} of expert 0 is {found[0].dtype.name}, "
                    f"of expert {expert} {spec.dtype.name}",
                    "experts of one layer have the same encodings",
                    "quantise from the unquantised checkpoint",
                )
            expert += len(run)
    return Layout.of(tuple(found[0] for found in specs.values()))


def _tensor_spec(weight: DenseWeight, part: Part) -> TensorSpec:
    return TensorSpec(weight.name, part.dtype, weight.part.shape, weight.layer, part.row_interleave)


def _model_files(checkpoint: Checkpoint) -> tuple[EmbeddedFile, ...]:
    if checkpoint.model is None:
        return ()
    data = checkpoint.model.to_bytes()
    return (EmbeddedFile(MODEL_FILE, len(data), lambda: data),)


def _in_file_order(
    file: FilePlan,
    dense: Sequence[tuple[DenseWeight, Part]],
    embedded: Sequence[EmbeddedFile],
    blocks: Sequence[BlockJob],
) -> tuple[Job, ...]:
    at_tensor = {tensor.name: tensor.offset for tensor in file.tensors}
    at_file = {entry.name: entry.offset for entry in file.files}
    jobs: list[tuple[int, Job]] = [
        (at_tensor[weight.name], TensorJob(weight.name, part)) for weight, part in dense
    ]
    jobs += [(at_file[item.name], FileJob(item)) for item in embedded]
    at_block = file.index["offset"].tolist()
    jobs += [(at_block[job.layer][job.expert], job) for job in blocks]
    return tuple(job for _, job in sorted(jobs, key=itemgetter(0)))


def job_bytes(job: Job) -> int:
    """Bytes of payload that `job` writes."""
    if isinstance(job, FileJob):
        return job.file.size
    if isinstance(job, TensorJob):
        return job.part.size
    return sum(part.size for part in job.parts)


def _metadata(
    source: Source,
    checkpoint: Checkpoint,
    options: RepackOptions,
    kinds: Sequence[tuple[Part, int]],
) -> dict[str, Any]:
    """Descriptive only, the same for the same input: base names, no dates, no folders."""
    types: dict[str, dict[str, int]] = {}
    for part, n in kinds:
        total = types.setdefault(part.dtype.name, {"bytes": 0, "tensors": 0})
        total["bytes"] += n * part.size
        total["tensors"] += n
    # Without a model nothing else tells how many experts a token reads.
    routing = {"top_k": checkpoint.top_k} if checkpoint.model is None else {}
    return {
        **routing,
        "dropped_tensors": list(checkpoint.dropped),
        "family": checkpoint.family.name,
        "layout": options.layout.value,
        **_order(options),
        "quantisation": options.quant.value,
        **_dense_quantisation(options),
        "source": {
            "files": sorted(_file_names(source)),
            "format": source.format,
        },
        "tool": {"name": "colibri-repack", "version": version("colibri-repack")},
        "types": types,
    }


def _file_names(source: Source) -> set[str]:
    """Names of the files that tensors come from: many tensors, few files."""
    found = [tensor.file for tensor in source.tensors.values()]
    files = dict(zip(map(id, found), found, strict=True))
    return {path.name.encode("utf-8", "replace").decode() for path in files.values()}


def _order(options: RepackOptions) -> dict[str, str]:
    if options.trace is None:
        return {"order": "layer-major"}
    return {"order": "trace", "trace": options.trace.name}


def _dense_quantisation(options: RepackOptions) -> dict[str, str]:
    record = {}
    if options.dense_quant not in (None, options.quant):
        record["dense_quantisation"] = options.dense_quant.value
    if options.imatrix is not None:
        record["imatrix"] = options.imatrix.path.name.encode("utf-8", "replace").decode()
    return record


def _warnings(file: FilePlan) -> list[str]:
    geometry = file.geometry
    advice = (
        padding_advice(uses_of(file), geometry.alignment),
        index_advice(file.index_bytes, geometry.n_layers, geometry.n_experts, file.block_bytes),
    )
    return [text for text in advice if text]


def _missing_tokenizer(source: Source, embedded: Sequence[EmbeddedFile]) -> list[str]:
    """A warning if no engine could turn text to tokens with what the file will hold."""
    names = {file.name for file in embedded}
    in_gguf = "gguf.json" in names and source.config.get("tokenizer.ggml.tokens") is not None
    if in_gguf or "tokenizer.json" in names:
        return []
    return ["the source has no tokenizer (no tokenizer.json): colibri run cannot read a prompt"]
