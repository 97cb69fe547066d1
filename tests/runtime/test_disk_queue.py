"""Requests in a kernel's queue: their order, and what follows from each way they can end."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime.blocks import block_slot_bytes
from colibri_runtime.disk_faults import MAX_AGAIN
from colibri_runtime.disk_files import Alignment, IoMode
from colibri_runtime.disk_queue import QueueEngine
from colibri_runtime.pool import Pool
from helpers.blocks import make_source, small_layout
from helpers.rings import ScriptedRing, ScriptedWorker, memory_at, open_plain, read_of

KEYS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
PAGES = Alignment(4096, 4096)
PASSING = [errno.EAGAIN, errno.ENOMEM, errno.EBUSY, errno.ECANCELED]


@pytest.fixture
def source(tmp_path):
    return make_source(
        tmp_path / "a.colibri", layouts=[small_layout(), small_layout()], n_experts=3
    )


@pytest.fixture
def pool(source):
    pool = Pool(6, block_slot_bytes(source))
    yield pool
    pool.close()


@pytest.fixture
def engine_of(source):
    """Makes engines over a scripted ring, whose clock stands still but for `sleep`."""
    made = []

    def make(ring=None, *, mode=IoMode.BUFFERED, alignment=PAGES, **options):
        time = [0]

        def sleep(seconds):
            time[0] += round(seconds * 1e9)

        engine = QueueEngine(
            ring or ScriptedRing(),
            [open_plain(source.path, mode=mode, alignment=alignment)],
            sleep=sleep,
            clock=lambda: time[0],
            **options,
        )
        engine.time = time
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(params=[ScriptedRing, ScriptedWorker])
def ring_class(request):
    return request.param


def run(engine, *reads):
    """Submits `reads` and waits for all; gives them in order of arrival."""
    for read in reads:
        engine.submit(read)
    done = []
    while len(done) < len(reads):
        done += engine.wait()
    assert engine.poll() == []
    return done


def assert_right(source, read):
    assert read.error is None
    assert np.array_equal(read.buffer[: read.size], source.payload[read.layer, read.expert])
    assert not read.buffer[read.size : read.length].any()


# One read


def test_a_block_is_read_whole_with_its_padding(source, pool, engine_of):
    pool.slot(0)[:] = 0xAA
    read = read_of(source, pool, (1, 2))

    assert run(engine_of(), read) == [read]

    assert_right(source, read)
    assert read.n_bytes == read.length
    assert read.n_rereads == 0


def test_a_short_read_goes_on_where_it_stopped(source, pool, engine_of, ring_class):
    ring = ring_class([1000, 1])
    read = read_of(source, pool)

    run(engine_of(ring), read)

    assert_right(source, read)
    starts = [request.offset - read.offset for request in ring.begun]
    assert starts == [0, 1000, 1001]
    assert [r.address for r in ring.begun] == [ring.begun[0].address + n for n in starts]


@pytest.mark.parametrize(("alignment", "start"), [(4096, 4096), (512, 4608)])
def test_a_short_direct_read_goes_on_at_a_boundary_of_the_disk(
    source, pool, engine_of, alignment, start, ring_class
):
    ring = ring_class([5000])
    read = read_of(source, pool)

    run(engine_of(ring, mode=IoMode.DIRECT, alignment=Alignment(4, alignment)), read)

    assert_right(source, read)
    assert [request.offset - read.offset for request in ring.begun] == [0, start]


def test_an_interrupted_request_is_made_again(source, pool, engine_of, ring_class):
    engine = engine_of(ring_class([-errno.EINTR] * 3))
    read = read_of(source, pool)

    run(engine, read)

    assert_right(source, read)
    assert engine.time == [0]


@pytest.mark.parametrize("number", PASSING)
def test_a_passing_error_is_answered_by_another_try_ever_later(
    source, pool, engine_of, number, ring_class
):
    engine = engine_of(ring_class([-number] * 3))
    read = read_of(source, pool)

    run(engine, read)

    assert_right(source, read)
    assert engine.time == [7_000_000]


@pytest.mark.parametrize("number", PASSING)
def test_an_error_that_does_not_pass_is_given_back(source, pool, engine_of, number, ring_class):
    engine = engine_of(ring_class([-number] * (MAX_AGAIN + 1)))
    read, after = read_of(source, pool), read_of(source, pool, (0, 1), 1)

    run(engine, read)
    run(engine, after)

    assert isinstance(read.error, StorageError)
    assert (read.error.code, read.error.errno) == ("os-error", number)
    assert_right(source, after)


def test_an_io_error_names_file_block_and_errno(source, pool, engine_of, ring_class):
    engine = engine_of(ring_class([-errno.EIO]))
    read, after = read_of(source, pool, (1, 2)), read_of(source, pool, (1, 2), 1)

    run(engine, read)
    run(engine, after)

    error = read.error
    assert isinstance(error, StorageError)
    assert (error.code, error.errno, error.filename) == ("io-error", errno.EIO, str(source.path))
    assert f"{source.path}: block L1/E2 at {read.offset:#x}" in str(error)
    assert_right(source, after)


@pytest.mark.parametrize("mode", list(IoMode))
@pytest.mark.parametrize("split_bytes", [0, 4096])
@pytest.mark.parametrize("cut", [0, 1, 4096, 5000])
def test_a_file_cut_inside_a_block_is_a_short_read(source, pool, engine_of, mode, split_bytes, cut):
    engine = engine_of(mode=mode, split_bytes=split_bytes)
    read = read_of(source, pool, (1, 2))
    os.truncate(source.path, read.offset + cut)

    run(engine, read)

    assert isinstance(read.error, StorageError)
    assert read.error.code == "short-read"
    assert read.error.filename == str(source.path)
    assert f"after {cut} of" in str(read.error)


@pytest.mark.parametrize("mode", list(IoMode))
def test_a_read_that_stops_before_the_end_of_the_file_is_tried_again(
    source, pool, engine_of, mode, ring_class
):
    engine = engine_of(ring_class([0] * 3), mode=mode)
    read = read_of(source, pool)

    run(engine, read)

    assert_right(source, read)
    assert engine.time == [7_000_000]


def test_a_read_that_stops_again_and_again_is_a_short_read(source, pool, engine_of, ring_class):
    read = read_of(source, pool)

    run(engine_of(ring_class([0] * (MAX_AGAIN + 1))), read)

    assert read.error.code == "short-read"
    assert "again and again" in str(read.error)


@pytest.mark.parametrize("mode", list(IoMode))
def test_a_file_that_ends_inside_the_padding_is_whole(source, pool, engine_of, mode):
    pool.slot(0)[:] = 0xAA
    read = read_of(source, pool, (1, 2))
    os.truncate(source.path, read.offset + read.size)

    run(engine_of(mode=mode), read)

    assert_right(source, read)


def test_a_flipped_bit_is_caught_after_a_second_read(source, pool, engine_of):
    read = read_of(source, pool, (0, 1))
    with open(source.path, "r+b") as file:
        file.seek(read.offset)
        file.write(bytes([source.payload[0, 1][0] ^ 1]))

    run(engine_of(), read)

    assert isinstance(read.error, FormatError)
    assert read.error.code == "block-checksum"
    assert f"{source.path}: block L0/E1 at {read.offset:#x}" in str(read.error)
    assert (read.n_rereads, read.n_bytes) == (1, 2 * read.length)


def flip_on_the_way(request, result):
    memory_at(request.address, 1)[0] ^= 1
    return result


def test_a_bit_flipped_on_the_way_is_read_again(source, pool, engine_of, ring_class):
    read = read_of(source, pool)

    run(engine_of(ring_class([flip_on_the_way])), read)

    assert_right(source, read)
    assert read.n_rereads == 1


def test_checks_can_be_left_out(source, pool, engine_of, ring_class):
    read = read_of(source, pool)

    run(engine_of(ring_class([flip_on_the_way]), is_verified=False), read)

    assert read.error is None
    assert (read.n_rereads, read.checksum_ns) == (0, 0)


# What does not suit the disk


def test_a_direct_read_that_the_disk_refuses_goes_through_the_page_cache(
    source, pool, engine_of, ring_class
):
    ring = ring_class([-errno.EINVAL])
    engine = engine_of(ring, mode=IoMode.DIRECT)
    read = read_of(source, pool)

    run(engine, read)

    assert_right(source, read)
    assert ring.begun[0].fd != ring.begun[1].fd
    assert [request.file for request in ring.begun] == [0, -1]
    assert engine.report().n_buffered_reads == 1


def test_a_buffered_read_that_is_refused_is_an_error(source, pool, engine_of, ring_class):
    read = read_of(source, pool)

    run(engine_of(ring_class([-errno.EINVAL])), read)

    assert (read.error.code, read.error.errno) == ("os-error", errno.EINVAL)


@pytest.mark.parametrize("wants", [Alignment(4, 8192), Alignment(1 << 20, 512)])
def test_a_block_that_does_not_suit_the_disk_is_not_asked_of_it_directly(
    source, pool, engine_of, wants, ring_class
):
    ring = ring_class()
    engine = engine_of(ring, mode=IoMode.DIRECT, alignment=wants)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]

    run(engine, *reads)

    for read in reads:
        assert_right(source, read)
    addresses = [read.buffer.__array_interface__["data"][0] for read in reads]
    misfits = [
        read.offset % wants.offset or address % wants.memory or read.length % wants.offset
        for read, address in zip(reads, addresses, strict=True)
    ]
    assert engine.report().n_buffered_reads == sum(map(bool, misfits)) > 0


def test_a_length_that_does_not_suit_the_disk_is_padded(source, pool, engine_of, ring_class):
    ring = ring_class()
    read = read_of(source, pool)
    whole = read.length
    read.length = read.size

    run(engine_of(ring, mode=IoMode.DIRECT), read)

    assert_right(source, read)
    assert [request.length for request in ring.begun] == [whole]


# Submitting


def test_a_full_queue_is_filled_as_requests_end(source, pool, engine_of, ring_class):
    ring = ring_class(answers=[2, -errno.EBUSY, -errno.EAGAIN, 1])
    engine = engine_of(ring)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]

    assert run(engine, *reads) == reads

    for read in reads:
        assert_right(source, read)
    assert engine.time == [0]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_kernel_that_takes_nothing_is_asked_again_later(
    source, pool, engine_of, number, ring_class
):
    engine = engine_of(ring_class(answers=[-number] * 3))
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:2])]

    run(engine, *reads)

    for read in reads:
        assert_right(source, read)
    assert engine.time[0] > 0


def test_a_kernel_that_never_takes_anything_fails_each_read(source, pool, engine_of, ring_class):
    ring = ring_class(answers=[-errno.ENOMEM] * 1000)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:2])]

    run(engine_of(ring), *reads)

    assert [read.error.errno for read in reads] == [errno.ENOMEM] * 2


def test_an_interrupted_submission_is_made_again(source, pool, engine_of, ring_class):
    engine = engine_of(ring_class(answers=[-errno.EINTR] * 3))
    read = read_of(source, pool)

    run(engine, read)

    assert_right(source, read)
    assert engine.time == [0]


def test_a_request_that_cannot_be_submitted_fails_alone(source, pool, engine_of):
    engine = engine_of(ScriptedRing(answers=[-errno.EBADF]))
    bad, good = read_of(source, pool), read_of(source, pool, (0, 1), 1)

    run(engine, bad, good)

    assert bad.error.errno == errno.EBADF
    assert_right(source, good)


# Several reads


def started(ring, *reads):
    """The keys of the requests that have begun, in that order."""
    keys = {read.offset: (read.layer, read.expert) for read in reads}
    return [keys[request.offset] for request in ring.begun]


def submit_all(engine, reads):
    for read in reads:
        engine.submit(read)
    engine.flush()


def test_no_more_requests_than_the_depth_are_in_flight(source, pool, engine_of):
    ring = ScriptedRing()
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]

    run(engine_of(ring, depth=2), *reads)

    assert ring.most_in_flight == 2
    assert started(ring, *reads) == KEYS


def test_demands_go_before_queued_prefetches(source, pool, engine_of, ring_class):
    ring = ring_class()
    engine = engine_of(ring, depth=1)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:4])]
    reads[1].is_prefetch = reads[2].is_prefetch = True

    run(engine, *reads)

    assert started(ring, *reads) == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_prefetches_begin_only_while_few_requests_are_in_flight(source, pool, engine_of):
    ring = ScriptedRing()
    engine = engine_of(ring, depth=8, prefetch_depth=2)
    ahead = [
        read_of(source, pool, key, slot, is_prefetch=True) for slot, key in enumerate(KEYS[:4])
    ]
    submit_all(engine, ahead)
    assert len(ring.begun) == 2

    demands = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[4:], 4)]
    submit_all(engine, demands)
    run(engine)
    done = [engine.wait()[0] for _ in range(6)]

    assert started(ring, *ahead, *demands) == [*KEYS[:2], *KEYS[4:], *KEYS[2:4]]
    assert done == [*ahead[:2], *demands, *ahead[2:]]


def test_a_promoted_prefetch_goes_before_other_prefetches(source, pool, engine_of):
    ring = ScriptedRing()
    engine = engine_of(ring, depth=1)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:3])]
    reads[1].is_prefetch = reads[2].is_prefetch = True
    submit_all(engine, reads)

    engine.promote(reads[2])
    run(engine)
    done = [engine.wait()[0] for _ in range(3)]

    assert done == [reads[0], reads[2], reads[1]]
    assert not reads[2].is_prefetch


def test_the_rest_of_a_promoted_prefetch_goes_before_later_demands(source, pool, engine_of):
    ring = ScriptedRing()
    engine = engine_of(ring, depth=1, split_bytes=4096)
    ahead = read_of(source, pool, (0, 0), 0, is_prefetch=True)
    submit_all(engine, [ahead])
    engine.promote(ahead)
    late = read_of(source, pool, (0, 1), 1)

    engine.submit(late)
    done = [engine.wait()[0] for _ in range(2)]

    assert done == [ahead, late]


def test_demands_go_before_the_rest_of_a_prefetch(source, pool, engine_of):
    engine = engine_of(depth=1, split_bytes=4096)
    ahead = read_of(source, pool, (0, 0), 0, is_prefetch=True)
    submit_all(engine, [ahead])
    late = read_of(source, pool, (0, 1), 1)

    engine.submit(late)
    done = [engine.wait()[0] for _ in range(2)]

    assert done == [late, ahead]


def test_only_a_read_that_has_not_begun_can_be_cancelled(source, pool, engine_of):
    ring = ScriptedRing()
    engine = engine_of(ring, depth=1)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:3])]
    reads[1].is_prefetch = True
    submit_all(engine, reads)

    cancelled = [engine.cancel(read) for read in reads]

    assert cancelled == [False, True, True]
    assert engine.wait() == [reads[0]]
    assert engine.poll() == []
    assert len(ring.begun) == 1


def test_waiting_gives_one_block_and_polling_all_that_have_landed(source, pool, engine_of):
    ring = ScriptedRing()
    ring.reap = lambda *, wait: [ring.finish(0) for _ in range(len(ring.queue))]
    engine = engine_of(ring)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:4])]
    submit_all(engine, reads)

    first = engine.wait()
    rest = engine.poll()

    assert first == reads[:1]
    assert rest == reads[1:]


def test_waiting_without_a_read_is_refused(engine_of):
    with pytest.raises(UsageError) as caught:
        engine_of().wait()

    assert caught.value.code == "no-read"


def test_blocks_arrive_in_the_order_in_which_they_end(source, pool, engine_of, ring_class):
    ring = ring_class()
    ring.reap = lambda *, wait: [ring.finish(-1)] if wait and ring.queue else []
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]

    done = run(engine_of(ring, depth=len(reads)), *reads)

    assert done == reads[::-1]
    for read in reads:
        assert_right(source, read)


# Pieces


def test_a_block_can_be_read_in_pieces(source, pool, engine_of):
    ring = ScriptedRing()
    read = read_of(source, pool)

    run(engine_of(ring, split_bytes=5000, mode=IoMode.DIRECT), read)

    assert_right(source, read)
    assert [request.length for request in ring.begun] == [8192, read.length - 8192]


def test_a_read_comes_back_only_when_none_of_its_pieces_is_in_flight(source, pool, engine_of):
    ring = ScriptedRing([-errno.EIO])
    engine = engine_of(ring, split_bytes=4096, depth=2)
    read = read_of(source, pool)
    engine.submit(read)

    (done,) = engine.wait()

    assert done.error.code == "io-error"
    assert ring.queue == []
    assert len(ring.begun) == 2  # the third was not begun: the block is lost anyhow


# Files


def test_blocks_of_several_files_are_read_by_number(source, pool, tmp_path, engine_of):
    other = make_source(tmp_path / "b.colibri", layouts=[small_layout()], n_experts=2, seed=1)
    engine = engine_of()
    number = engine.add_file(open_plain(other.path))
    mine, theirs = read_of(source, pool), read_of(other, pool, (0, 1), 1, file=number)

    run(engine, mine, theirs)

    assert_right(source, mine)
    assert_right(other, theirs)


@pytest.mark.parametrize("file", [-1, 1])
def test_an_unknown_file_is_refused(source, pool, engine_of, file):
    with pytest.raises(UsageError) as caught:
        engine_of().submit(read_of(source, pool, file=file))

    assert caught.value.code == "no-such-file"


# Ends


def test_a_closed_engine_takes_no_reads(source, pool, engine_of, ring_class):
    ring = ring_class()
    engine = engine_of(ring)
    submit_all(engine, [read_of(source, pool)])
    engine.close()
    engine.close()

    with pytest.raises(UsageError) as caught:
        engine.submit(read_of(source, pool))

    assert caught.value.code == "engine-closed"
    assert ring.is_closed
    assert engine.poll() == []


def test_answers_lost_to_an_exception_are_asked_for_again(source, pool, engine_of, ring_class):
    ring = ring_class()
    engine = engine_of(ring)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:2])]
    submit_all(engine, reads)
    ring.queue.clear()

    done = [engine.wait()[0] for _ in range(2)]

    assert done == reads
    for read in reads:
        assert_right(source, read)


def test_a_queue_that_fails_itself_is_an_error(source, pool, engine_of, ring_class):
    ring = ring_class()

    def reap(*, wait):
        raise OSError(errno.EBADF, "Bad file descriptor")

    engine = engine_of(ring)
    ring.reap = reap
    submit_all(engine, [read_of(source, pool)])

    with pytest.raises(StorageError) as caught:
        engine.wait()

    assert (caught.value.code, caught.value.errno) == ("os-error", errno.EBADF)


ACTS = st.one_of(
    st.none(),
    st.integers(1, 20_000),
    st.sampled_from([-errno.EINTR, -errno.EAGAIN, -errno.ENOMEM, -errno.EIO, -errno.EINVAL]),
    st.just(flip_on_the_way),
)
ANSWERS = st.one_of(
    st.none(), st.integers(1, 3), st.sampled_from([-errno.EAGAIN, -errno.EBUSY, -errno.EINTR])
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    source = make_source(
        tmp_path_factory.mktemp("shared") / "a.colibri", layouts=[small_layout()] * 2, n_experts=3
    )
    return source, Pool(6, block_slot_bytes(source))


@settings(max_examples=150, deadline=None)
@given(
    acts=st.lists(ACTS, max_size=12),
    answers=st.lists(ANSWERS, max_size=6),
    ahead=st.lists(st.booleans(), min_size=6, max_size=6),
    picks=st.lists(st.integers(0, 5), max_size=12),
    depth=st.integers(1, 4),
    split_bytes=st.sampled_from([0, 4096, 8192]),
    mode=st.sampled_from(list(IoMode)),
    ring_class=st.sampled_from([ScriptedRing, ScriptedWorker]),
)
def test_whatever_fails_each_read_comes_back_once_and_right_or_with_an_error(
    shared, acts, answers, ahead, picks, depth, split_bytes, mode, ring_class
):
    source, pool = shared
    ring = ring_class(acts, answers)
    ring.reap = lambda *, wait: (
        [ring.finish((picks.pop() if picks else 0) % len(ring.queue))] if ring.queue else []
    )
    engine = QueueEngine(
        ring,
        [open_plain(source.path, mode=mode)],
        depth=depth,
        split_bytes=split_bytes,
        sleep=lambda seconds: None,
    )
    reads = [
        read_of(source, pool, key, slot, is_prefetch=ahead[slot]) for slot, key in enumerate(KEYS)
    ]
    try:
        done = run(engine, *reads)
    finally:
        engine.close()

    assert sorted(map(id, done)) == sorted(map(id, reads))
    assert ring.most_in_flight <= (ring.backlog or depth)
    for read in reads:
        if read.error is None and flip_on_the_way not in acts:
            assert_right(source, read)
        elif read.error is None:
            # A bit flipped in the padding is nobody's: only the payload has a checksum.
            assert np.array_equal(read.buffer[: read.size], source.payload[read.layer, read.expert])
        else:
            assert read.error.code in ("io-error", "os-error", "block-checksum")


# Given up on the way


def test_a_read_that_is_cancelled_under_way_comes_back_without_its_block(source, pool, engine_of):
    engine = engine_of(ScriptedWorker())
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS[:3])]
    for read in reads:
        engine.submit(read)
    engine.flush()

    assert [engine.cancel(read) for read in reads[:2]] == [False, True]
    done = [*engine.wait(), *engine.wait()]

    assert done == [reads[0], reads[2]]
    assert (reads[0].is_cut, reads[0].error, reads[0].n_bytes) == (True, None, 4096)
    assert_right(source, reads[2])


def test_one_that_is_wanted_after_all_is_read_again(source, pool, engine_of):
    engine = engine_of(ScriptedWorker())
    read = read_of(source, pool, is_prefetch=True)
    engine.submit(read)
    engine.flush()
    engine.cancel(read)
    engine.promote(read)

    assert engine.wait() == [read]
    assert not read.is_cut
    assert_right(source, read)
