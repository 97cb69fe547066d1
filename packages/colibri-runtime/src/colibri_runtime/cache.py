"""Which block stands in which slot: free, loading, in use or resident. Bookkeeping without I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from .policy import Key, Policy


class Cache:
    """Owner of slot numbers; each is free, or belongs to exactly one block.

    A block is loading (being read), pinned (resident and in use), or resident and left to the
    policy. `claim` starts a load, `land` or `land_ahead` ends it well, `abandon` ends it badly;
    `pin` and `release` bracket use. All look-ups and evictions cost the same however many slots
    there are. Not thread-safe: one thread owns it.

    Slots may come in several classes, one for each size: `n_slots` of class 0, in which `policy`
    decides, and so on in `further`; they are numbered through. A block is only ever in a slot of
    its class, `class_of(key)`, and a policy is told of the blocks of its own class alone. So
    nothing that happens in one class takes a slot from another.

    `on_waste` is told of blocks that were read ahead and are evicted without any use.
    """

    def __init__(
        self,
        n_slots: int,
        policy: Policy,
        on_waste: Callable[[Key], None] | None = None,
        *,
        further: Sequence[tuple[int, Policy]] = (),
        class_of: Callable[[Key], int] | None = None,
    ) -> None:
        classes = [(n_slots, policy), *further]
        self._policies = [policy for _, policy in classes]
        self._free: list[list[int]] = []
        self._class_of_slot: list[int] = []
        for number, (count, _) in enumerate(classes):
            first = len(self._class_of_slot)
            self._free.append(list(range(first + count - 1, first - 1, -1)))
            self._class_of_slot += [number] * count
        self.n_slots = self._n_open = len(self._class_of_slot)
        self._class_of = class_of or (lambda key: 0)
        # By slot, so that a hit costs one look-up of its key and none of its class.
        self._policy_of_slot = [self._policies[number] for number in self._class_of_slot]
        self._only = self._policies[0] if len(classes) == 1 else None
        self._tells_all = {
            what: tell
            for what in ("pin", "release", "touch")
            if (tell := getattr(self._only, f"{what}_all", None)) is not None
        }
        self._resident: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._loading: dict[Key, int] = {}
        # By slot: numbers are found faster than pairs of them.
        self._pinned: set[int] = set()
        self._unused: set[int] = set()
        self._waiting: set[int] = set()
        self._on_waste = on_waste
        self._n_resident = 0
        self.n_evicted = 0

    @property
    def n_resident(self) -> int:
        """Blocks that can be used without a read."""
        return self._n_resident

    @property
    def n_loading(self) -> int:
        """Slots that a read owns."""
        return len(self._loading)

    @property
    def n_pinned(self) -> int:
        """Blocks in use."""
        return len(self._pinned)

    @property
    def n_free(self) -> int:
        """Slots that no block owns."""
        return sum(map(len, self._free))

    @property
    def n_waiting(self) -> int:
        """Resident blocks that were read ahead and whose layer has not been asked for since."""
        return len(self._waiting)

    def n_waiting_in(self, number: int) -> int:
        """Those of them in slots of class `number`."""
        if self._only is not None:
            return len(self._waiting)
        return sum(self._class_of_slot[slot] == number for slot in self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key[1] in self._resident[key[0]]

    def row(self, layer: int) -> Mapping[int, int]:
        """The slots of a layer's resident experts, as they are now and change."""
        return self._resident[layer]

    def slot_of(self, key: Key) -> int | None:
        """The slot of a resident block, None where it is not resident."""
        return self._resident[key[0]].get(key[1])

    def owners(self) -> dict[int, Key]:
        """The block that owns each slot that is not free."""
        found = {slot: key for key, slot in self._loading.items()}
        for layer, row in self._resident.items():
            found |= {slot: (layer, expert) for expert, slot in row.items()}
        return found

    def pin(self, key: Key) -> int | None:
        """The slot of `key`, which is in use from now on; None where it is not resident."""
        slot = self._resident[key[0]].get(key[1])
        if slot is not None and slot not in self._pinned:
            self._policy_of_slot[slot].pin(key)
            self._pinned.add(slot)
            self._waiting.discard(slot)
        return slot

    def pin_all(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The slots of a layer's experts, all resident and none in use, which are from now on."""
        row = self._resident[layer]
        slots = [row[expert] for expert in experts]
        self._tell("pin", layer, experts, slots)
        self._pinned.update(slots)
        if self._waiting:
            self._waiting.difference_update(slots)
        return slots

    @property
    def has_unused(self) -> bool:
        """Whether any block was read ahead and not used yet."""
        return bool(self._unused)

    def take_unused(self, layer: int, experts: Iterable[int]) -> int:
        """How many of a layer's experts were read ahead and are now used for the first time."""
        row = self._resident[layer]
        used = self._unused.intersection(row[expert] for expert in experts if expert in row)
        self._unused -= used
        return len(used)

    def release(self, key: Key) -> None:
        """`key` is no longer in use."""
        slot = self._resident[key[0]][key[1]]
        self._pinned.remove(slot)
        self._policy_of_slot[slot].release(key)

    def release_all(self, layer: int, experts: Sequence[int]) -> None:
        """A layer's experts, all in use, are no longer."""
        row = self._resident[layer]
        slots = [row[expert] for expert in experts]
        self._pinned.difference_update(slots)
        self._tell("release", layer, experts, slots)

    def touch(self, key: Key) -> None:
        """`key` is expected to be asked for soon."""
        slot = self._resident[key[0]].get(key[1])
        if slot is not None and slot not in self._pinned:
            self._policy_of_slot[slot].touch(key)

    def touch_all(self, layer: int, experts: Sequence[int]) -> None:
        """A layer's experts, all resident, are expected to be asked for soon."""
        row = self._resident[layer]
        idle = [expert for expert in experts if row[expert] not in self._pinned]
        self._tell("touch", layer, idle, [row[expert] for expert in idle])

    def expire(self, key: Key) -> None:
        """`key` was read ahead in vain."""
        slot = self._resident[key[0]].get(key[1])
        if slot in self._waiting:
            self._waiting.remove(slot)
            self._policy_of_slot[slot].expire(key)

    def claim(self, key: Key, *, is_prefetch: bool = False) -> int | None:
        """A slot to read `key` into, free or made free; None while every other block of its class
        is needed."""
        number = self._class_of(key)
        free = self._free[number]
        if free:
            slot = free.pop()
        else:
            victim = self._policies[number].victim(is_prefetch=is_prefetch)
            if victim is None:
                return None
            slot = self._leave(victim)
        self._loading[key] = slot
        return slot

    def claim_free(self, key: Key) -> int | None:
        """A slot that is free to read `key` into; None where none of its class is."""
        free = self._free[self._class_of(key)]
        if not free:
            return None
        slot = self._loading[key] = free.pop()
        return slot

    def loading_beyond(self, n_open: int) -> list[Key]:
        """The blocks that are being read into slots from `n_open` on."""
        return [key for key, slot in self._loading.items() if slot >= n_open]

    def resize(self, n_open: int) -> None:
        """Uses the first `n_open` slots from now on; the last class has the others.

        Blocks in slots beyond are given up; none is being read or in use.
        """
        owners = self.owners()
        for slot, key in owners.items():
            if slot >= n_open:
                # It knows the block no more if this was broken off before and is made again.
                with suppress(KeyError):
                    self._policy_of_slot[slot].pin(key)
                self._leave(key)
        # What comes is taken last, and the lowest first. Whole at each point, should this be broken
        # off and made again.
        known = set(self._free[-1]).union(owners)
        come = [slot for slot in range(n_open - 1, self._n_open - 1, -1) if slot not in known]
        self._free[-1] = come + [slot for slot in self._free[-1] if slot < n_open]
        self._n_open = n_open

    def land(self, key: Key) -> int:
        """The slot of `key`, whose read succeeded and which is in use from now on."""
        slot = self._arrive(key)
        self._pinned.add(slot)
        return slot

    def land_ahead(self, key: Key) -> int:
        """The slot of `key`, whose read succeeded before anything asked for it."""
        slot = self._arrive(key)
        self._unused.add(slot)
        self._waiting.add(slot)
        self._policy_of_slot[slot].admit(key)
        return slot

    def abandon(self, key: Key) -> None:
        """The read of `key` failed or was called off: its slot is free again."""
        slot = self._loading.pop(key)
        self._free[self._class_of_slot[slot]].append(slot)

    def _leave(self, key: Key) -> int:
        """The slot of a block that is resident no more, and that no policy knows."""
        slot = self._resident[key[0]].pop(key[1])
        self._n_resident -= 1
        self.n_evicted += 1
        self._waiting.discard(slot)
        if slot in self._unused:
            self._unused.remove(slot)
            if self._on_waste is not None:
                self._on_waste(key)
        return slot

    def _arrive(self, key: Key) -> int:
        slot = self._loading.pop(key)
        self._resident[key[0]][key[1]] = slot
        self._n_resident += 1
        return slot

    def _tell(self, what: str, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Tells the policies of several blocks of a layer."""
        if not experts:
            return
        if (tell_all := self._tells_all.get(what)) is not None:
            tell_all(layer, experts)
            return
        for expert, slot in zip(experts, slots, strict=True):
            getattr(self._policy_of_slot[slot], what)((layer, expert))
