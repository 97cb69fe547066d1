"""The core of a store in C: csrc/store.h."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, StorageError, UsageError
from colibri_format.layout import block_seed

from ._native import NativeLibrary, native
from .blocks import BlockTable
from .core import Core, Experts, check_experts, no_slot
from .disk import BlockRead, DiskEngine
from .disk_faults import PASSING, kernel_error
from .disk_files import OpenFile
from .disk_fill import read_block
from .disk_queue import QueueEngine
from .disk_ring import MAX_REQUEST
from .fetch import Fetch, closed_error
from .lease import Lease
from .native_records import check_sizes
from .policy import KeepAll, Key, Policy, fuse_tokens
from .policy_native import NativePolicy, float_packer, int_packer
from .pool import Pool
from .pool_plan import PoolPlan
from .stats import LayerStats
from .timeline import Span, SpanKind, Timeline

MOST_BLOCKS: Final = 1 << 30
_MOST_CLASSES: Final = 4  # COLIBRI_STORE_CLASSES
_FRESH: Final = 0x40000000  # COLIBRI_STORE_FRESH
_KNOWN: Final = 0xFF & ~8  # ~COLIBRI_STORE_STATE_FRESH

_BLOCK: Final = np.dtype(
    [
        *((name, "u8") for name in ("offset", "seed", "size", "checksum")),
        ("length", "u4"),
        *((name, "i4") for name in ("fd", "file", "number", "slot", "loading")),
    ],
    align=True,
)
_CLASS: Final = np.dtype(
    [
        ("policy", "u8"),
        *((name, "i4") for name in (
            "first", "n_slots", "n_open", "n_free", "n_prefetch", "n_ahead", "n_waiting",
            "reserved",
        )),
    ]
)  # fmt: skip
_EVENT: Final = np.dtype(
    [
        (name, "i8")
        for name in (
            "block", "layer", "submit_ns", "begun_ns", "ended_ns", "n_bytes", "is_prefetch",
        )
    ]
)  # fmt: skip
_LEAST_EVENTS: Final = 4096
_STATE_WORDS: Final = (
    "n_layers", "width", "n_slots", "n_classes", "is_open", "layer", "observed", "n_reads",
    "n_resident", "n_pinned", "n_evicted", "n_pending", "n_wanted", "n_ready", "n_leased",
    "n_failed", "n_ahead", "n_unused", "n_events", "event_room",
)  # fmt: skip
# By what there is one of each, and the type.
_ARRAYS: Final[dict[str, tuple[str, Any]]] = {
    "counts": ("layer", np.dtype((np.int64, len(LayerStats().as_dict())))),
    "n_predicted": ("layer", np.int32),
    "has_classes": ("layer", np.uint8),
    "blocks": ("block", _BLOCK),
    "predicted": ("block", np.int32),
    "marks": ("block", np.uint8),
    "addresses": ("slot", np.uint64),
    "owners": ("slot", np.int32),
    "free": ("slot", np.int32),
    "ahead": ("slot", np.int32),
    "states": ("slot", np.uint8),
    "pending": ("expert", np.int32),
    "wanted": ("expert", np.int32),
    "ready": ("expert", np.int32),
    "leased": ("expert", np.int32),
    "failed": ("expert", np.int32),
    "late": ("expert", np.int32),
    "failures": ("expert", np.int64),
    "experts": ("expert", np.int32),
    "weights": ("expert", np.float64),
    "is_named": ("expert", np.uint8),
}
# struct colibri_store.
_STATE: Final = np.dtype(
    [
        *((name, "i4") for name in _STATE_WORDS),
        ("given_ns", "i8"),
        ("ended_ns", "i8"),
        ("worker", "u8"),
        ("classes", _CLASS, _MOST_CLASSES),
        ("events", "u8"),
        ("submitted", "u8"),
        *((name, "u8") for name in _ARRAYS),
    ]
)
_ENDED: Final = (4 * len(_STATE_WORDS) + 8) // 8


def native_core(
    table: BlockTable,
    pool: Pool,
    engine: DiskEngine,
    plan: PoolPlan,
    policies: Sequence[Policy],
    timeline: Timeline | None = None,
) -> NativeCore | None:
    """A core in C where C can do all of it, else None.

    It takes an engine whose ring has a thread of its own (`WorkerRing`), policies that compute in C
    or keep everything, and blocks that are read in one request each.
    """
    library = native().library
    driver = engine.driver() if isinstance(engine, QueueEngine) else None
    if library is None or driver is None:
        return None
    # Not what is derived from them, which C would not call.
    known = all(type(policy) in (NativePolicy, KeepAll) for policy in policies)
    n_blocks = table.n_layers * table.most_experts
    if not known or len(policies) > _MOST_CLASSES or not 0 < n_blocks < MOST_BLOCKS:
        return None
    worker, files, is_verified = driver
    blocks = _blocks(table, files, pool, plan, is_verified=is_verified)
    if blocks is None:
        return None
    core = NativeCore(library, table, pool, engine, plan, policies, files, blocks, worker)
    if timeline is not None:
        timeline.follow(core.write_down())
    return core


class NativeCore(Core):
    """Bookkeeping in C, one call a step; nothing of Python's is touched between two.

    What fails with a demand, and may do better, is read again here, by the thread that waits for
    it, as the engines without a thread do.
    """

    def __init__(
        self,
        library: NativeLibrary,
        table: BlockTable,
        pool: Pool,
        engine: DiskEngine,
        plan: PoolPlan,
        policies: Sequence[Policy],
        files: Sequence[OpenFile],
        blocks: NDArray[Any],
        worker: int,
    ) -> None:
        # A fetch may outlive its store. Before the pool, so that it goes first: its thread writes
        # there.
        self._engine = engine
        self._table = table
        self._pool = pool
        self._files = files
        self._policies = policies
        self._has_policies = any(isinstance(policy, NativePolicy) for policy in policies)
        self._is_verified = bool((blocks["size"] > 0).any())
        self._width = width = table.most_experts
        n_of = {
            "layer": table.n_layers,
            "block": table.n_layers * width,
            "slot": pool.n_slots,
            "expert": width,
        }
        self._arrays = {name: np.zeros(n_of[of], kind) for name, (of, kind) in _ARRAYS.items()}
        self._arrays["blocks"] = blocks
        self._arrays["addresses"][:] = pool.addresses
        self._state = np.zeros(1, _STATE)
        state = self._state[0]
        state["n_layers"], state["width"] = table.n_layers, width
        state["n_slots"], state["n_classes"] = pool.n_slots, len(policies)
        state["worker"] = worker
        first = 0
        for number, (policy, slots) in enumerate(zip(policies, plan.classes, strict=True)):
            of = state["classes"][number]
            of["first"], of["n_slots"] = first, plan.shape[number][0]
            of["n_open"] = slots.plan.n_slots
            of["n_prefetch"] = slots.plan.n_prefetch
            first += plan.shape[number][0]
            if isinstance(policy, NativePolicy):
                of["policy"] = policy.address(width)
                for layer, n_blocks in enumerate(slots.blocks_per_layer):
                    self._arrays["has_classes"][layer] |= (n_blocks > 0) << number
        for name, array in self._arrays.items():
            state[name] = _address(array)
        self._at = _address(self._state)
        # Views that give one number in a tenth of NumPy's time.
        self._words = self._state.view(np.uint8).data.cast("i")
        self._longs = self._state.view(np.uint8).data.cast("q")
        self._leased = self._arrays["leased"].data
        self._owners = self._arrays["owners"].data
        self._states = self._arrays["states"].data
        self._experts = self._arrays["experts"].data.cast("B")
        self._weights = self._arrays["weights"].data.cast("B")
        self._leases: list[Any] = [None] * pool.n_slots
        self._number = 0
        self._n_asked = 0
        self._is_shut = False
        self._is_passing = False
        self.stats = NativeStats(self._arrays["counts"])
        self.cache = NativeSlots(self._state, self._arrays, width)
        counts = np.dtype((np.int64, len(_COUNT_NAMES)))
        records = (_STATE, _BLOCK, _CLASS, counts, _EVENT)
        check_sizes(library, "colibri_store_struct_bytes", records, __name__)
        function = library.function
        self._observe = function("colibri_store_observe", "i32", "ptr", "i32", "i32", "i32")
        self._fetch = function("colibri_store_fetch", "i32", "ptr", "i32", "i32")
        self._take = function("colibri_store_take", "i32", "ptr", "i32")
        self._mend = function("colibri_store_mend", "i32", "ptr", "i32")
        self._close = function("colibri_store_close", "i32", "ptr")
        self._prefetch = function("colibri_store_prefetch", "i32", "ptr", "i32", "i32")
        self._preload = function("colibri_store_preload", "i32", "ptr", "i32", "i32")
        self._resize = function("colibri_store_resize", "i32", "ptr", "i32")
        function("colibri_store_begin", "i32", "ptr")(self._at)

    @property
    def is_open(self) -> bool:
        return self._words[_IS_OPEN] != 0

    @property
    def layer(self) -> int:
        return self._words[_LAYER]

    @property
    def ended_ns(self) -> int:
        return self._longs[_ENDED]

    @property
    def n_reads(self) -> int:
        return self._words[_N_READS]

    @property
    def n_pending(self) -> int:
        return self._words[_N_PENDING]

    @property
    def n_asked(self) -> int:
        return self._n_asked

    def observe(
        self, layer: int, experts: NDArray[np.integer], weights: NDArray[np.floating] | None
    ) -> None:
        if not self._has_policies:
            return
        asked, shares = fuse_tokens(experts, weights)
        n = self._tell(layer, asked)
        if shares is not None:
            float_packer(n).pack_into(self._weights, 0, *shares)
        if self._observe(self._at, layer, n, shares is not None) < 0:
            check_experts(self._table, layer, asked)

    def fetch(self, layer: int, experts: Experts) -> Fetch:
        if not isinstance(experts, list):
            experts = list(experts)
        n_told = self._tell(layer, experts)
        # The number first: no handle of an earlier fetch, dropped meanwhile, may close this one.
        number = self._number + 1
        fetch = Fetch(self, number)
        self._number = number
        try:
            n = self._fetch(self._at, layer, n_told)
            if n < 0:
                check_experts(self._table, layer, experts)
                raise self._queue_error(n)
        except BaseException:
            self._close(self._at)
            raise
        self._n_asked = n
        return fetch

    def next(self, number: int) -> Lease | None:
        given = self._give(number, 1)
        return given[0] if given else None

    def take(self, number: int) -> list[Lease]:
        return self._give(number, self._width)

    def close(self, number: int) -> None:
        if number == self._number and not self._is_shut:
            self._close(self._at)

    @property
    def n_layers(self) -> int:
        """Of all sources."""
        return self._table.n_layers

    @property
    def width(self) -> int:
        """Blocks that a layer has at most: block `layer * width + expert` is C's number of one."""
        return self._width

    def layouts(self, layer: int) -> list[Layout | None]:
        """The layout of each of a layer's `width` blocks, None where there is no block."""
        table = self._table
        return [
            table.layout(layer, expert) if table.has(layer, expert) else None
            for expert in range(self._width)
        ]

    @property
    def address(self) -> int:
        """Of its struct colibri_store, for those who drive it from C."""
        return self._at

    def begin_pass(self) -> None:
        """Whoever holds a fetch has an earlier one from here on: C opens and closes its own."""
        self._number += 1
        self._n_asked = 0
        self._is_passing = True

    def answer(self, code: int) -> None:
        """Does what C asks for with a negative `code` of a fetch or a take, before it goes on.

        Raises:
            StorageError, FormatError: a demand failed, and again when it was read once more; or the
                queue is useless.
            UsageError: `no-slot`.
        """
        if code == -errno.EIO:
            self._read_failed()
        elif code == -errno.ENOENT:
            experts = self._arrays["experts"].tolist()
            raise UsageError(
                "no-such-expert", "store", f"was asked for one that no layer has, of {experts}",
                "experts that the index holds",
            )  # fmt: skip
        elif code == -errno.ENOSPC:
            raise no_slot(self.layer)
        elif code != -errno.EINTR:
            raise self._queue_error(code)

    def end_pass(self) -> None:
        """Closes what C has left open."""
        if not self._is_shut:
            self._close(self._at)
        self._is_passing = False

    def recover(self) -> None:
        # A second signal may have come before the pass that a first one broke off was ended.
        if self._is_passing:
            self.end_pass()

    def prefetch(self, layer: int, experts: Experts, *, is_read: bool = True) -> None:
        if not isinstance(experts, list):
            experts = list(experts)
        if not is_read or self._prefetch(self._at, layer, self._tell(layer, experts)) < 0:
            check_experts(self._table, layer, experts)

    def preload(self, key: Key) -> bool:
        return bool(self._preload(self._at, *key))

    def resize(self, n_open: int) -> None:
        while (code := self._resize(self._at, n_open)) < 0:
            if code != -errno.EINTR:
                raise self._queue_error(code)

    def shut(self) -> None:
        self._is_shut = True
        for name in ("is_open", "n_ready", "n_leased", "n_wanted", "n_pending", "n_reads"):
            self._state[0][name] = 0
        # Their views would keep the pool's memory for as long as the store is held.
        self._leases.clear()

    def write_down(self) -> Callable[[], list[Span]]:
        """From now on reads and waits are written down; gives what hands over those that have
        ended since it was called last."""
        n_events = max(_LEAST_EVENTS, 2 * len(self._arrays["blocks"]))
        events = self._arrays["events"] = np.zeros(n_events, _EVENT)
        self._arrays["submitted"] = np.zeros(len(self._arrays["blocks"]), np.int64)
        state, width = self._state[0], self._width
        state["event_room"] = n_events
        for name in ("events", "submitted"):
            state[name] = _address(self._arrays[name])

        def spans() -> list[Span]:
            n = int(state["n_events"])
            state["n_events"] = 0
            return [
                Span(SpanKind.WAIT, layer, begun, ended)
                if block < 0
                else Span(
                    SpanKind.READ, layer, begun, ended, block % width, submit, size, ahead != 0
                )
                for block, layer, submit, begun, ended, size, ahead in events[:n].tolist()
            ]

        return spans

    def _give(self, number: int, most: int) -> list[Lease]:
        if self._is_shut:
            raise closed_error()
        if number != self._number:
            return []
        try:
            while (n := self._take(self._at, most)) < 0:
                self.answer(n)
        except BaseException:
            self._close(self._at)
            raise
        leases = self._leases
        return [
            leases[slot] if slot < _FRESH else self._lease(slot - _FRESH)
            for slot in self._leased[:n].tolist()
        ]

    def _lease(self, slot: int) -> Lease:
        layer, expert = divmod(self._owners[slot], self._width)
        lease = Lease(
            layer,
            expert,
            self._table.layout(layer, expert),
            slot,
            self._pool.addresses[slot],
            self._pool.view(slot),
        )
        self._leases[slot] = lease
        # Only now: an exception, Ctrl-C say, may come at any point before.
        self._states[slot] &= _KNOWN
        return lease

    def _tell(self, layer: int, experts: Sequence[int]) -> int:
        """Writes `experts` where C reads them; how many there are."""
        n = len(experts)
        if n > self._width:
            experts = list(dict.fromkeys(map(int, experts)))
            n = len(experts)
        try:
            int_packer(n).pack_into(self._experts, 0, *experts)
        except struct.error:
            # Too many, or a number that no int32 holds: none that there is. Or no ints, but whole.
            experts = list(map(int, experts))
            check_experts(self._table, layer, experts)
            int_packer(n).pack_into(self._experts, 0, *experts)
        return n

    def _read_failed(self) -> None:
        """Reads the demand that failed last once more, here; raises if that does not mend it."""
        state, arrays = self._state[0], self._arrays
        place = int(state["n_failed"]) - 1
        block, result = int(arrays["failed"][place]), int(arrays["failures"][place])
        layer, expert = divmod(block, self._width)
        slot = int(arrays["blocks"][block]["loading"])
        read = self._table.plan_read(layer, expert, slot=slot, buffer=self._pool.slot(slot))
        read.address = self._pool.addresses[slot]
        is_right = False
        try:
            self._read_again(read, result)
            is_right = True
        finally:
            more = {
                "demand_bytes": read.n_bytes,
                "read_ns": read.read_ns,
                "checksum_ns": read.checksum_ns,
                "n_rereads": read.n_rereads,
            }
            for name, count in more.items():
                arrays["counts"][layer, _COUNT_NAMES.index(name)] += count
            self._mend(self._at, is_right)

    def _read_again(self, read: BlockRead, result: int) -> None:
        file = self._files[read.file]
        if result == self._arrays["blocks"][read.tag * self._width + read.expert]["length"]:
            read.n_rereads = 1
        elif result < 0 and -result not in _PASSING:
            raise kernel_error(file.path, read, OSError(-result, os.strerror(-result)))
        read_block(file, read, is_verified=self._is_verified)

    def _queue_error(self, code: int) -> StorageError:
        error = OSError(-code, os.strerror(-code))
        return StorageError.of(error, "disk engine", "waiting for reads")


class NativeStats:
    """As `stats.Stats`, of counts that C keeps: `(n_layers, n_names) int64`."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._counts = counts

    @property
    def layers(self) -> tuple[LayerStats, ...]:
        """Counts of each layer as they are now."""
        return tuple(LayerStats(*row) for row in self._counts.tolist())

    def total(self) -> LayerStats:
        """All layers together as they are now."""
        return LayerStats(*self._counts.sum(axis=0).tolist())


class NativeSlots:
    """As `cache.Cache`, to look at."""

    def __init__(self, state: NDArray[Any], arrays: Mapping[str, NDArray[Any]], width: int) -> None:
        self._state = state
        self._arrays = arrays
        self._width = width
        self._words = state.view(np.uint8).data.cast("i")

    @property
    def n_slots(self) -> int:
        """Slots of all classes."""
        return self._words[_N_SLOTS]

    @property
    def n_evicted(self) -> int:
        """Blocks that gave up their slots."""
        return self._words[_N_EVICTED]

    @property
    def n_resident(self) -> int:
        """Blocks that can be used without a read."""
        return self._words[_N_RESIDENT]

    @property
    def n_loading(self) -> int:
        """Slots that a read owns."""
        return int((self._arrays["blocks"]["loading"] >= 0).sum())

    @property
    def n_pinned(self) -> int:
        """Blocks in use."""
        return self._words[_N_PINNED]

    @property
    def n_free(self) -> int:
        """Slots that no block owns."""
        return int(self._state[0]["classes"]["n_free"].sum())

    @property
    def n_waiting(self) -> int:
        """Resident blocks that were read ahead and whose layer has not been asked for since."""
        return int(self._state[0]["classes"]["n_waiting"].sum())

    def __contains__(self, key: Key) -> bool:
        return self.slot_of(key) is not None

    def slot_of(self, key: Key) -> int | None:
        """The slot of a resident block, None where it is not resident."""
        layer, expert = key
        if not (0 <= layer < int(self._state[0]["n_layers"]) and 0 <= expert < self._width):
            return None
        slot = int(self._arrays["blocks"]["slot"][layer * self._width + expert])
        return None if slot < 0 else slot

    def owners(self) -> dict[int, Key]:
        """The block that owns each slot that is not free."""
        blocks = self._arrays["blocks"]
        slots = np.maximum(blocks["slot"], blocks["loading"])
        return {
            int(slots[block]): divmod(int(block), self._width)
            for block in np.flatnonzero(slots >= 0)
        }


def _blocks(
    table: BlockTable,
    files: Sequence[OpenFile],
    pool: Pool,
    plan: PoolPlan,
    *,
    is_verified: bool,
) -> NDArray[Any] | None:
    """A record of _BLOCK for each, or None where one cannot be read in a single request."""
    blocks = np.zeros((table.n_layers, table.most_experts), _BLOCK)
    for layer in range(table.n_layers):
        found = table.row(layer)
        row = blocks[layer, : len(found.sizes)]
        for number in sorted(set(found.files[found.sizes > 0].tolist())):
            file = files[number]
            here = (found.sizes > 0) & (found.files == number)
            step = file.alignment.offset if file.fd != file.buffered_fd else 1
            length = -(-found.padded[here] // step) * step
            if (
                (found.offsets[here] % step).any()
                or (step > 1 and 4096 % file.alignment.memory)
                or (length > MAX_REQUEST).any()
            ):
                return None
            row["length"][here] = length
            row["fd"][here] = file.fd
            row["file"][here] = number
            row["number"][here] = [plan.class_of_bytes(n) for n in found.padded[here].tolist()]
        row["offset"] = found.offsets
        if is_verified:
            row["size"], row["checksum"] = found.sizes, found.checksums
            row["seed"] = [
                block_seed(found.own_layer, expert) for expert in range(len(found.sizes))
            ]
    rooms = np.array([slots.slot_bytes for slots in plan.classes], np.int64)
    if (blocks["length"] > rooms[blocks["number"]]).any():
        return None
    return blocks.reshape(-1)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


_COUNT_NAMES: Final = tuple(LayerStats().as_dict())
_IS_OPEN, _LAYER, _N_READS, _N_PENDING, _N_SLOTS, _N_EVICTED, _N_RESIDENT, _N_PINNED = (
    _STATE_WORDS.index(name)
    for name in (
        "is_open", "layer", "n_reads", "n_pending", "n_slots", "n_evicted", "n_resident",
        "n_pinned",
    )
)  # fmt: skip
_PASSING: Final = PASSING | {errno.EINTR, errno.EINVAL}
