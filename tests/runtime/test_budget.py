"""How a budget is spent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_format import ColibriError, UsageError
from colibri_runtime.budget import (
    MemoryNeeds,
    default_budget,
    index_bytes,
    plan_memory,
    total_bytes,
    usage_bytes,
)
from colibri_runtime.errors import BudgetError

MIB = 2**20


def needs_of(**changes):
    facts = {
        "where": "model.colibri",
        "dense_bytes": 40 * MIB,
        "kv_bytes": 8 * MIB,
        "working_bytes": 4 * MIB,
        "index_bytes": index_bytes((4, 16)),
        "census": ({MIB: 16},) * 4,
        "top_k": 4,
    }
    return MemoryNeeds(**(facts | changes))


@given(
    extra=st.integers(0, 200 * MIB),
    slot_pages=st.integers(1, 2000),
    blocks=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    depth=st.integers(0, 2),
    threads=st.integers(1, 8),
)
def test_a_plan_stays_within_its_budget_and_leaves_no_room_for_a_slot(
    extra, slot_pages, blocks, depth, threads
):
    size = slot_pages * 4096
    needs = needs_of(census=tuple({size: n} if n else {} for n in blocks))
    smallest = total_bytes(needs, 1 if any(blocks) else 0, io_threads=threads)

    plan = plan_memory(smallest + extra, needs, prefetch_depth=depth, io_threads=threads)

    assert plan.total_bytes <= plan.budget_bytes
    assert plan.total_bytes == (
        plan.dense_bytes
        + plan.kv_bytes
        + plan.working_bytes
        + plan.overhead_bytes
        + plan.pool_bytes
    )
    assert plan.smallest_bytes == smallest
    if plan.n_slots < plan.n_blocks:
        assert total_bytes(needs, plan.n_slots + 1, io_threads=threads) > plan.budget_bytes
    else:
        assert plan.total_bytes == plan.largest_bytes
    assert plan.slots.n_slots == plan.n_slots


def test_the_smallest_budget_named_is_the_smallest_that_works():
    with pytest.raises(BudgetError) as caught:
        plan_memory(MIB, needs_of())

    error = caught.value
    assert error.code == "budget-too-small"
    assert isinstance(error, MemoryError)
    assert isinstance(error, ColibriError)
    assert f"at least {error.smallest_bytes} bytes" in str(error)
    assert plan_memory(error.smallest_bytes, needs_of()).n_slots == 1
    with pytest.raises(BudgetError):
        plan_memory(error.smallest_bytes - 1, needs_of())


def test_a_model_without_blocks_needs_no_pool():
    plan = plan_memory(80 * MIB, needs_of(census=({}, {})))

    assert (plan.n_slots, plan.pool_bytes) == (0, 0)


def test_no_more_slots_than_blocks_are_made():
    plan = plan_memory(10**12, needs_of())

    assert plan.n_slots == 64
    assert plan.total_bytes == plan.largest_bytes < 10**12


def test_wasteful_slots_are_reported():
    needs = needs_of(census=({MIB: 8, MIB // 2: 8},) * 4)

    plan = plan_memory(62 * MIB, needs)

    assert plan.slot_waste == plan.equal_waste == 0.25
    assert "25% of the pool is lost because blocks are smaller" in plan.notes[-1]


def test_the_pool_takes_no_more_than_its_part():
    plan = plan_memory(90 * MIB, needs_of(), cache_bytes=10 * MIB)

    assert plan.n_slots == 9
    assert plan.total_bytes <= 80 * MIB


def test_what_policies_and_histories_keep_is_counted():
    some = usage_bytes((48, 128), is_recalling=False, keeps_history=False)

    assert some >= 48 * 128 * 175
    assert usage_bytes((48, 128), is_recalling=True, keeps_history=False) >= some + 48 * 16896
    assert usage_bytes((48, 128), is_recalling=False, keeps_history=True) > some


def test_a_part_without_room_for_a_slot_is_refused():
    with pytest.raises(BudgetError) as caught:
        plan_memory(90 * MIB, needs_of(), cache_bytes=MIB)

    assert caught.value.code == "budget-too-small"
    assert "give --cache-size 2M" in str(caught.value)


def test_hits_to_expect_come_from_what_was_asked_for_in_the_past():
    counts = np.ones((4, 16))
    counts[:, 3] = 15

    plan = plan_memory(62 * MIB, needs_of(), counts=counts)

    share = (4 * 15 + plan.n_slots - 4) / (4 * 30)
    assert plan.slots.expected_hit_share == pytest.approx(share)
    assert plan_memory(62 * MIB, needs_of()).slots.expected_hit_share is None


def test_a_tight_plan_carries_the_notes_of_its_slots():
    assert "rounds" in " ".join(plan_memory(56 * MIB, needs_of()).notes)


@pytest.mark.parametrize("available", [55 * MIB, 70 * MIB, 10**12])
def test_the_default_budget_works_and_stays_within_what_is_available(available):
    needs = needs_of()

    budget = default_budget(needs, available)

    plan = plan_memory(budget, needs)
    assert budget <= max(plan.smallest_bytes, 0.8 * available)
    assert budget <= plan.largest_bytes


def test_no_budget_is_chosen_that_the_machine_does_not_have():
    with pytest.raises(BudgetError) as caught:
        default_budget(needs_of(), MIB)

    assert caught.value.code == "budget-too-small"
    assert "1 MiB of memory are available" in str(caught.value)


def test_without_a_figure_a_budget_must_be_given():
    with pytest.raises(UsageError) as caught:
        default_budget(needs_of(), None)

    assert caught.value.code == "no-memory-figure"


def test_the_plan_goes_into_json():
    record = plan_memory(90 * MIB, needs_of()).as_dict()

    classes = record["slots"]["classes"]
    assert sum(c["plan"]["n_slots"] for c in classes) == record["n_slots"]
