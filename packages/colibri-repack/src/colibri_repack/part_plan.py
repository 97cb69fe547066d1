"""What each slice of the source becomes, from the options and the slice's name and type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from colibri_format import DTYPES, INTERLEAVE, DType, Role

from .decoding import FP8_DTYPES, Slice
from .errors import RepackError
from .families import Checkpoint, is_matrix
from .imatrix import Imatrix, Importance
from .kernel_layout import FASTER_INTERLEAVED, KernelLayout, is_looked_up, obstacle
from .quantise import MixFacts, Quant, fitting, is_value, mixed
from .recode import RECODABLE
from .tuples import tuples_of

_MATRIX_ROLES: Final = {Role.GATE: "gate", Role.UP: "up", Role.DOWN: "down"}
_ARCHITECTURES_70B: Final = frozenset({"llama", "qwen2"})


class Conversion(Enum):
    """What is done to the bytes of a slice."""

    COPY = "copy"
    RECODE = "recode"


class Part(NamedTuple):
    """One slice of the source on its way into the file; `dtype` is what it becomes.

    `size` is in bytes, of the output. `importance` weighs the columns when it is quantised;
    `row_interleave` is 0, or how many rows are interleaved (spec, section 9).
    """

    source: Slice
    conversion: Conversion
    dtype: DType
    size: int
    importance: Importance | None = None
    row_interleave: int = 0

    @classmethod
    def of(
        cls,
        source: Slice,
        conversion: Conversion,
        dtype: DType,
        importance: Importance | None = None,
    ) -> Part:
        """The part that `source` becomes as `dtype`, in plain rows."""
        return cls(source, conversion, dtype, dtype.size_bytes(source.shape), importance)


class PartPlanner:
    """Chooses each slice's conversion, and remembers those that could not have the type asked."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant: Quant,
        dense_quant: Quant,
        *,
        may_requantise: bool = False,
        imatrix: Imatrix | None = None,
        layout: KernelLayout = KernelLayout.PLAIN,
    ) -> None:
        self.layout = layout
        self.quant = quant
        self.dense_quant = dense_quant
        self.may_requantise = may_requantise
        self.imatrix = imatrix
        names = [weight.name for weight in checkpoint.dense]
        values = sorted(
            (weight.layer or 0, weight.name) for weight in checkpoint.dense if is_value(weight.name)
        )
        self._values = {name: place for place, (_, name) in enumerate(values)}
        self._n_experts = checkpoint.n_experts
        self._facts = MixFacts(
            n_layers=len(checkpoint.experts),
            n_experts=checkpoint.n_experts,
            n_values=len(values),
            is_tied="output.weight" not in names,
            is_70b=_is_70b(checkpoint),
        )
        self._fallbacks: dict[str, str] = {}
        self._requantised: dict[str, int] = {}
        self._unweighed: dict[str, None] = {}
        self._kept_plain: dict[str, dict[str, None]] = {}
        self._obstacles: dict[tuple[str, tuple[int, ...]], str] = {}

    def dense(self, name: str, layer: int | None, part: Slice) -> Part:
        """The dense tensor `name`.

        Raises:
            RepackError: `requantize`, and `imatrix-size` from the importance matrix.
        """
        planned = self._dense(name, layer, part)
        if not is_matrix(name) or is_looked_up(name, is_tied=self._facts.is_tied):
            return planned
        return self._laid_out(name, planned)

    def _dense(self, name: str, layer: int | None, part: Slice) -> Part:
        if self.dense_quant is Quant.KEEP:
            return Part.of(part, Conversion.COPY, part.dtype)
        _refuse_kept_fp8(part, self.dense_quant)
        if not is_matrix(name):
            return self._plain(part)
        return self._matrix(self.dense_quant, name, layer or 0, part, None)

    def experts(self, layer: int, role: Role, column: Sequence[Slice]) -> list[tuple[Part, ...]]:
        """The segments `role` of a layer's experts, in order; raises as `dense`.

        They come in runs of neighbours that differ in nothing but their place and importance.
        """
        runs: list[tuple[Part, ...]] = []
        start = 0
        while start < len(column):
            first = column[start]
            stop = _end_of_run(column, start)
            part = self._expert(layer, start, role, first)
            if role in _MATRIX_ROLES:
                part = self._laid_out(self._stack(layer, role), part)
            if part.conversion is Conversion.RECODE and first.dtype.is_quantised:
                self._requantised[first.dtype.name] += stop - start - 1
            runs.append(self._alike(part, layer, role, column[start:stop], start))
            start = stop
        return runs

    def _alike(
        self, part: Part, layer: int, role: Role, column: Sequence[Slice], first: int
    ) -> tuple[Part, ...]:
        """What `part` is for the first slice of `column`, expert `first`'s, for all of them."""
        source, conversion, dtype, size, importance, row_interleave = part
        decoder = source.decoder
        if decoder is not column[0].decoder:
            column = list(
                tuples_of(Slice, ((s.tensor, s.offset, s.shape, decoder) for s in column))
            )
        weights = [importance] * len(column)
        if importance is not None:
            stack, n_columns = self._stack(layer, role), source.shape[-1]
            weights = [
                self._importance(stack, n_columns, expert)
                for expert in range(first, first + len(column))
            ]
        n = len(column)
        fields = zip(
            column, [conversion] * n, [dtype] * n, [size] * n, weights, [row_interleave] * n,
            strict=True,
        )  # fmt: skip
        return tuple(tuples_of(Part, fields))

    def _expert(self, layer: int, expert: int, role: Role, part: Slice) -> Part:
        if self.quant is Quant.KEEP:
            return Part.of(part, Conversion.COPY, part.dtype)
        _refuse_kept_fp8(part, self.quant)
        if role not in _MATRIX_ROLES:
            return self._plain(part)
        return self._matrix(self.quant, self._stack(layer, role), layer, part, expert)

    def _stack(self, layer: int, role: Role) -> str:
        """The name of all experts' matrices together."""
        suffix = "_exps" if self._n_experts > 1 else ""
        return f"blk.{layer}.ffn_{_MATRIX_ROLES[role]}{suffix}.weight"

    def notes(self) -> list[str]:
        """What was decided otherwise than asked, or at a price."""
        notes = []
        by_types: dict[str, list[str]] = {}
        for name, change in self._fallbacks.items():
            by_types.setdefault(change, []).append(name)
        for change, names in by_types.items():
            notes.append(f"{change} where rows are no whole quant blocks: {some(names)}")
        for dtype, count in self._requantised.items():
            notes.append(f"{count} slices were {dtype} already: quantised twice, errors add up")
        if self._unweighed:
            notes.append(
                f"the importance matrix lacks {len(self._unweighed)} tensors, quantised without: "
                f"{some(tuple(self._unweighed))}"
            )
        for reason, kept in self._kept_plain.items():
            notes.append(f"rows stay plain, {reason}: {some(kept)}")
        return notes

    def _laid_out(self, name: str, part: Part) -> Part:
        """`part` in the layout that is asked for; where that cannot be, plain and remembered."""
        is_wanted = part.dtype.name in FASTER_INTERLEAVED or self.layout is KernelLayout.X16
        if self.layout is KernelLayout.PLAIN or not is_wanted:
            return part
        # Experts are many and alike: each kind of matrix is looked at once.
        kind = part.dtype.name, part.source.shape
        reason = self._obstacles.get(kind)
        if reason is None:
            reason = self._obstacles[kind] = obstacle(part.dtype, part.source.shape)
        if reason:
            self._kept_plain.setdefault(reason, {})[name] = None
            return part
        return part._replace(row_interleave=INTERLEAVE)

    def _plain(self, part: Slice) -> Part:
        """Norms, router, biases: F32 whatever is asked; what is no float type stays.

        What is F32 already goes the same way, as it must be finite, too.
        """
        if part.dtype.name not in ("f32", "f16", "bf16"):
            return Part.of(part, Conversion.COPY, part.dtype)
        return Part.of(part.as_f32(), Conversion.RECODE, DTYPES["f32"])

    def _matrix(self, quant: Quant, name: str, layer: int, part: Slice, expert: int | None) -> Part:
        n_columns = part.shape[-1]
        asked = quant.base
        if quant.is_mix:
            asked = mixed(quant, name, n_columns, layer, self._values.get(name, 0), self._facts)
        dtype = fitting(asked, n_columns)
        if dtype is not asked:
            self._fallbacks[name] = f"{asked.name} became {dtype.name}"
        if part.dtype.name == dtype.name:
            return Part.of(part, Conversion.COPY, dtype)
        self._check_source(part, dtype)
        importance = None
        if self.imatrix is not None and dtype.is_quantised:
            importance = self._importance(name, n_columns, expert or 0)
            if importance is None:
                self._unweighed[name] = None
        return Part.of(part.as_f32(), Conversion.RECODE, dtype, importance)

    def _importance(self, name: str, n_columns: int, matrix: int) -> Importance | None:
        if self.imatrix is None:
            return None
        n_matrices = self._n_experts if name.endswith("_exps.weight") else 1
        return self.imatrix.importance(name, n_columns, matrix, n_matrices)

    def _check_source(self, part: Slice, dtype: DType) -> None:
        where = f"{part.tensor.file}: tensor {part.tensor.name!r}"
        if part.dtype.name not in RECODABLE:
            raise RepackError(
                "requantize",
                where,
                f"is {part.dtype.name}, which nothing here decodes",
                f"one of {', '.join(sorted(RECODABLE))} to make {dtype.name} of",
                "repack with --quant keep, or take the unquantised checkpoint",
            )
        if not part.dtype.is_quantised:
            return
        if not self.may_requantise:
            raise RepackError(
                "requantize",
                where,
                f"is {part.dtype.name} already",
                f"F32, F16 or BF16 to make {dtype.name} of",
                "repack with --quant keep, take the unquantised checkpoint, or accept the loss "
                "with --allow-requantize",
            )
        self._requantised[part.dtype.name] = self._requantised.get(part.dtype.name, 0) + 1


def _end_of_run(column: Sequence[Slice], start: int) -> int:
    """Where the slices end that are of the same shape and encoding as the one at `start`."""
    tensor, _, shape, decoder = column[start]
    dtype = tensor.dtype
    for place in range(start + 1, len(column)):
        other = column[place]
        if other.tensor.dtype is not dtype or other.shape != shape or other.decoder is not decoder:
            return place
    return len(column)


def _refuse_kept_fp8(part: Slice, quant: Quant) -> None:
    if part.dtype.name in FP8_DTYPES and len(part.shape) > 1:
        raise RepackError("bad-quant", f"{part.tensor.file}: tensor {part.tensor.name!r}",
                          f"keeps FP8, and quant is {quant.value}",
                          "one of both", "leave out --fp8 keep")  # fmt: skip


def some(names: Iterable[str], most: int = 6) -> str:
    """The first of `names`, and how many more there are."""
    names = tuple(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _is_70b(checkpoint: Checkpoint) -> bool:
    model = checkpoint.model
    return (
        model is not None
        and model.family in _ARCHITECTURES_70B
        and model.n_layers == 80
        and model.n_kv_heads < model.n_heads
    )
