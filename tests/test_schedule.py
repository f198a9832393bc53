"""The schedule against the pattern, with integers alone: every pair of the pattern is computed exactly M times."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax import DilatedPattern, Segments, Window
from ringjax._schedule.make import make_schedule
from ringjax._schedule.schedule import BranchSchedule, Rotation
from ringjax._schedule.side import Side
from ringjax._schedule.strategy import schedules_with
from ringjax._tools.pairs import num_kept_pairs, num_tile_pairs


@st.composite
def branches(draw):
    if draw(st.booleans()):
        return Window(draw(st.integers(1, 20)), draw(st.integers(1, 6)))
    length = draw(st.integers(1, 40))
    return Segments(length, draw(st.integers(1, length)))


@st.composite
def geometries(draw):
    offsets = draw(st.sampled_from(["interleaved", "blocked", "branch"]))
    pattern = draw(st.lists(branches(), min_size=1, max_size=3)), offsets
    return pattern, draw(st.integers(1, 50)), draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.booleans())


def tokens_of(schedule: BranchSchedule, side: Side, shard: int, offset: int, is_computed: bool = True) -> np.ndarray:
    """The tokens in all padded rows of a shard, where it computes or keeps them, by chunks; -1 in padding."""
    chunk = np.arange(side.num_chunks)[:, None]
    holder, row = shard, np.arange(side.num_blocks * side.block_rows)
    if is_computed:
        holder, row = schedule.origin(shard, row, side)
    token, is_row = side.row_token(holder, chunk, row, offset)
    return np.where(is_row, token, -1)


def steps(schedule: BranchSchedule, shard: int, rotations: tuple[Rotation, ...], side: Side):
    """The shards and the sides of what comes to a shard, itself first."""
    yield shard, side
    for rotation in rotations:
        for hops in range(1, rotation.steps + 1):
            if schedule.is_new(shard, hops, rotation.direction):
                yield schedule.source(shard, hops, rotation.direction), side
        if rotation.halo and schedule.is_new(shard, rotation.steps + 1, rotation.direction):
            yield schedule.source(shard, rotation.steps + 1, rotation.direction), rotation.of_halo(side)


def held_pairs(schedule: BranchSchedule, queries: np.ndarray, keys: np.ndarray, offset: int) -> np.ndarray:
    """Which of the pairs of some tokens, of none below zero, the branch holds."""
    t, s = queries[:, None], keys[None]
    holds = schedule.branch.holds(t, s, offset) & (t >= 0) & (s >= 0)
    return holds & (s <= t) if schedule.is_causal else holds


def computed_pairs(schedule: BranchSchedule, offset: int, length: int, do_queries_travel: bool = False) -> np.ndarray:
    """How often the devices together compute each pair (t, s): those of chunks with the same number."""
    count = np.zeros((length, length), int)
    moving, rotations = (
        (schedule.queries, schedule.query_rotations) if do_queries_travel else (schedule.keys, schedule.key_rotations)
    )
    resident = schedule.keys if do_queries_travel else schedule.queries
    for shard in range(schedule.num_shards):
        own = tokens_of(schedule, resident, shard, offset)
        for source, side in steps(schedule, shard, rotations, moving):
            sides = own, tokens_of(schedule, side, source, offset)
            for queries, keys in zip(*(sides[::-1] if do_queries_travel else sides), strict=True):
                pairs = np.nonzero(held_pairs(schedule, queries, keys, offset))
                np.add.at(count, (queries[pairs[0]], keys[pairs[1]]), 1)
    return count


@given(geometries(), st.booleans(), st.sampled_from(["none", "zigzag", "stripes"]), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_pair_is_computed_once_for_each_branch_that_holds_it(geometry, do_queries_travel, balance, block_rows):
    """Whichever side travels, and however rows are dealt."""
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern(*geometry[0]), *geometry[1:]
    multiplicity = pattern.multiplicity(length, num_heads, is_causal)
    for head in range(num_heads):
        count = np.zeros((length, length), int)
        for schedule in make_schedule(pattern, length, num_shards, num_heads, is_causal, block_rows, balance=balance):
            offset = pattern.offset(head, schedule.branch, schedule.number, num_heads)
            count += computed_pairs(schedule, offset, length, do_queries_travel)
        np.testing.assert_array_equal(count, multiplicity[head])


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_each_kept_token_has_one_slot_on_its_own_shard(geometry):
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern(*geometry[0]), *geometry[1:]
    for schedule in make_schedule(pattern, length, num_shards, num_heads, is_causal):
        side = schedule.queries
        fullest = 0
        for offset in range(schedule.branch.offset_rate):
            for shard in range(num_shards):
                tokens = tokens_of(schedule, side, shard, offset, is_computed=False)
                fullest = max(fullest, (tokens >= 0).sum(axis=1).max())
                own = np.arange(shard * side.shard_length, (shard + 1) * side.shard_length)
                kept = own[side.is_kept(own, offset)]
                np.testing.assert_array_equal(np.sort(tokens[tokens >= 0]), kept)
                chunk, row = side.token_row(shard, kept, offset)
                np.testing.assert_array_equal(tokens[chunk, row], kept)
                if side.is_strided and side.chunks != "phases":  # one of each step, in order
                    np.testing.assert_array_equal(kept, own[0] + offset + (chunk * side.chunk_rows + row) * side.step)
        # No padding is there for nothing, but where the padding of the length takes rows away.
        assert fullest == side.chunk_rows or length % side.chunk_length or length < num_shards * side.shard_length


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_halos_are_those_rows_that_a_neighbor_sees(geometry):
    """All of them, and no tokens that none does; none goes round an end, and all of a closed ring's shards meet."""
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern(*geometry[0]), *geometry[1:]
    for schedule in make_schedule(pattern, length, num_shards, num_heads, is_causal):
        if schedule.is_closed or schedule.queries.chunks == "phases":  # of these only whole rows are sent
            continue
        shard_length, token = schedule.queries.shard_length, np.arange(length)
        shard = token // shard_length
        # Rates thin out what is sent: here all tokens between the first and the last that are seen count.
        first, last = schedule.branch.seen(token[:, None], is_causal)
        sees = (first <= token) & (token <= last)
        for rotations, seen in ((schedule.key_rotations, sees), (schedule.query_rotations, sees.T)):
            for rotation in rotations:
                hops = rotation.direction * (shard[:, None] - shard)  # of each token to those that see it
                furthest = hops[seen].max()
                assert rotation.steps == furthest - 1
                sent = np.nonzero(seen & (hops == furthest))[1] % shard_length
                depth = shard_length - sent if rotation.direction > 0 else sent + 1
                assert rotation.halo == depth.max()
                assert all(there - here == rotation.halo_hops for here, there in schedule.hop(rotation.halo_hops))


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_rings_are_made_of_neighbors_and_permuted_in_cycles(geometry):
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern(*geometry[0]), *geometry[1:]
    for schedule in make_schedule(pattern, length, num_shards, num_heads, is_causal):
        for shard in range(num_shards):
            first, size = schedule.ring(shard)
            assert first <= shard < first + size <= num_shards
            assert size == schedule.ring_size or (first + size == num_shards and size < schedule.ring_size)
            for direction in (1, -1):
                sources = [schedule.source(shard, step, direction) for step in range(size)]
                assert sorted(sources) == list(range(first, first + size))
            # A segment never reaches over the boundary of two rings.
            start = first * schedule.queries.shard_length
            assert not start or start >= length or schedule.branch.seen(start)[0] == start
        for direction in (1, -1):
            for hops in (1, 1 - schedule.ring_size):
                sources, destinations = zip(*schedule.permutation(direction * hops), strict=True)
                assert sorted(sources) == sorted(destinations) == list(range(num_shards))
            # One rotation after another brings what `source` says.
            held = list(range(num_shards))
            rotation = {destination: source for source, destination in schedule.permutation(direction)}
            for step in range(schedule.ring_size):
                assert held == [schedule.source(shard, step, direction) for shard in range(num_shards)]
                if step < schedule.ring_size - 1:
                    held = [held[rotation[shard]] for shard in range(num_shards)]
            # The way home from the last step.
            home = {there: here for here, there in schedule.permutation(direction * (1 - schedule.ring_size))}
            assert [held[home[shard]] for shard in range(num_shards)] == list(range(num_shards))


@pytest.mark.parametrize(
    ("segment_length", "num_shards", "ring_size", "chunk_length"),
    [
        (16, 4, 1, 16),  # the segment is the shard
        (4, 4, 1, 4),  # several segments in a shard
        (32, 4, 2, 16),  # a segment over two shards
        (48, 4, 3, 16),  # rings of three and of one
        (64, 4, 4, 16),
        (1000, 4, 4, 16),  # longer than the sequence
        (24, 4, 3, 16),  # straddling, with a common boundary after three shards
        (5, 4, 4, 16),  # straddling, with none
        (7, 1, 1, 7),  # one device cuts segments whatever they are
    ],
)
def test_rings_and_chunks(segment_length, num_shards, ring_size, chunk_length):
    (schedule,) = make_schedule(DilatedPattern([Segments(segment_length)]), 16 * num_shards, num_shards, 1)
    assert schedule.ring_size == ring_size
    assert schedule.queries.chunk_length == chunk_length


def test_only_kept_rows_have_slots():
    (schedule,) = make_schedule(DilatedPattern.of_lengths((4096,), (16,)), 8192, 8, 4)
    assert schedule.ring_size == 4
    assert schedule.queries.chunk_rows == 1024 // 16
    assert schedule.queries.num_padded_rows == 64


@pytest.mark.parametrize(("segment_length", "rate"), [(8192, 1), (8192, 3), (64, 1), (7, 2), (640, 1)])
def test_tiles_hold_all_slots_and_little_more(segment_length, rate):
    (schedule,) = make_schedule(DilatedPattern.of_lengths((segment_length,), (rate,)), 8192, 2, 1)
    side = schedule.queries
    num_rows = side.num_blocks * side.block_rows
    assert side.chunk_rows <= num_rows < side.chunk_rows + side.num_blocks
    assert side.block_rows * side.chunks_per_tile <= 512
    assert side.num_tiles * side.chunks_per_tile == side.num_chunks * side.num_blocks


def test_numbers_beyond_the_sequence_stay_small():
    (schedule,) = make_schedule(DilatedPattern.of_lengths((10**12,), (10**11,)), 100, 8, 3)
    assert max(schedule.branch.length, schedule.branch.rate) < 2**31
    assert schedule.queries.chunk_rows == 1
    expected = DilatedPattern.of_lengths((10**12,), (10**11,)).multiplicity(100, 3)
    for head in range(3):
        np.testing.assert_array_equal(computed_pairs(schedule, head, 100), expected[head])


def test_work_does_not_depend_on_the_layout():
    # The number of hops is that of the shards that share a segment, and no more.
    for num_shards in (1, 2, 4, 8, 16):
        (schedule,) = make_schedule(DilatedPattern.of_lengths((256,), (2,)), 1024, num_shards, 1)
        assert schedule.ring_size == max(1, math.ceil(256 / (1024 / num_shards)))


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("ring_size", [2, 3, 4, 5, 8, 16])
def test_causal_work_is_the_same_on_every_device_in_every_step(ring_size, rate):
    shard_length = 64
    length = 2 * ring_size * shard_length
    pattern = DilatedPattern.of_lengths((ring_size * shard_length,), (rate,))
    (schedule,) = make_schedule(pattern, length, 2 * ring_size, 1, is_causal=True)
    assert schedule.ring_size == ring_size
    computed = [tokens_of(schedule, schedule.queries, shard, 0)[0] for shard in range(2 * ring_size)]
    work = lambda shard, step: held_pairs(schedule, computed[shard], computed[schedule.source(shard, step)], 0).sum()
    steps = [[work(shard, step) for shard in range(2 * ring_size)] for step in range(ring_size)]
    critical_path = sum(map(max, steps))
    assert critical_path <= 1.02 * sum(map(sum, steps)) / (2 * ring_size)
    # Not along the path alone: in each step all devices do exactly the same.
    assert all(len(set(step)) == 1 for step in steps)


@pytest.mark.parametrize("window", [Window(40), Window(150), Window(9, 4), Window(7, 5)])
def test_a_causal_window_is_the_same_work_on_all_devices_but_the_first(window):
    """Each computes the pairs of its own queries and no others, so none more than those inside."""
    shards, shard_length = 8, 64
    (schedule,) = make_schedule(DilatedPattern([window]), shards * shard_length, shards, 1, is_causal=True)
    pairs = []
    for shard in range(shards):
        queries = tokens_of(schedule, schedule.queries, shard, 0)
        assert set(queries.ravel() // shard_length) == {shard}
        came = [
            tokens_of(schedule, side, source, 0)
            for source, side in steps(schedule, shard, schedule.key_rotations, schedule.keys)
        ]
        pairs.append(
            sum(held_pairs(schedule, t, s, 0).sum() for keys in came for t, s in zip(queries, keys, strict=True))
        )
    inner = window.count(np.arange(4 * shard_length, 5 * shard_length), 0, 512, 0, 512, is_causal=True).sum()
    assert pairs[4] == inner
    assert max(pairs) <= 1.02 * inner


def met_pairs(schedule: BranchSchedule, shard: int, offsets: tuple[int, ...]) -> int:
    """The pairs in the tiles of a shard of which some query sees from its first to its last key one of the other's."""

    def tiles(side: Side, shard: int) -> np.ndarray:
        rows = np.stack([tokens_of(schedule, side, shard, offset) for offset in offsets])
        empty = np.full((len(offsets), side.num_full_chunks - side.num_chunks, rows.shape[2]), -1)
        sizes = len(offsets), side.num_tile_groups, side.chunks_per_tile, side.num_blocks, side.block_rows
        return np.concatenate([rows, empty], axis=1).reshape(sizes).transpose(1, 2, 3, 0, 4)  # [groups, C, I, O, R]

    queries = tiles(schedule.queries, shard)
    first, last = schedule.branch.seen(queries, schedule.is_causal)
    low = np.where(queries >= 0, first, queries.max() + 1).min(axis=(3, 4))[..., None]
    high = np.where(queries >= 0, last, -1).max(axis=(3, 4))[..., None]
    total = 0
    for source, side in steps(schedule, shard, schedule.key_rotations, schedule.keys):
        keys = tiles(side, source)
        most = keys.max(axis=(3, 4))[:, :, None]
        least = np.where(keys >= 0, keys, most[..., None, None].max() + 1).min(axis=(3, 4))[:, :, None]
        is_active = ((low <= most) & (least <= high) & (most >= 0)).any(axis=1)
        total += int(is_active.sum()) * schedule.queries.block_rows * side.block_rows * side.chunks_per_tile
    return total


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "branch",
    [
        *(Segments(16), Segments(96), Segments(96, 4), Segments(384), Segments(384, 2), Segments(130)),
        *(Segments(100, 3), Window(9), Window(40), Window(150), Window(13, 4), Window(21, 5)),
    ],
    ids=str,
)
def test_pairs_of_tiles_that_meet(branch, is_causal):
    """The count in closed form is that of the busiest device's tiles, one by one."""
    for length, shards in ((384, 8), (370, 5), (92, 2)):
        (one,) = make_schedule(DilatedPattern([branch]), length, shards, 3, is_causal, max_block_rows=8)
        offsets = tuple(head % one.branch.offset_rate for head in range(3))
        counted = max(met_pairs(one, shard, offsets) for shard in range(shards))
        stated = num_tile_pairs(one, offsets)
        is_exact = length == 384 or (one.queries.chunks == "whole" and not one.is_zigzag)
        assert stated == counted if is_exact else stated >= counted  # tiles without a row count there
        assert stated >= num_kept_pairs(one, offsets)


def test_pairs_of_tiles_of_one_query():
    """Which the head of the smallest offset does not keep, but another does."""
    (one,) = make_schedule(DilatedPattern([Segments(1024, 4)]), 1, 1, 4, True, key_length=1002, query_offset=1001)
    offsets = (0, 1, 2, 3)
    assert num_tile_pairs(one, offsets) == met_pairs(one, 0, offsets) > num_kept_pairs(one, offsets) > 0


def test_swapping_is_its_own_inverse_and_stays_in_the_ring():
    for num_shards, segment_length in ((8, 64), (8, 24), (7, 32), (5, 1000)):
        (schedule,) = make_schedule(
            DilatedPattern.of_lengths((segment_length,), (1,)), 8 * num_shards, num_shards, 1, True
        )
        assert schedule.is_zigzag
        partners = dict(schedule.swap_permutation())
        for shard, partner in partners.items():
            assert partners[partner] == shard
            assert schedule.ring(partner) == schedule.ring(shard)
        places = set(itertools.product(range(num_shards), range(schedule.queries.num_padded_rows)))
        unsorted = dataclasses.replace(schedule, sorts_halves=False)
        held = lambda one, shard: [one.origin(shard, row, one.queries) for row in range(one.queries.num_padded_rows)]
        assert {place for shard in range(num_shards) for place in held(schedule, shard)} == places
        for shard in range(num_shards):
            assert held(schedule, shard) == sorted(held(unsorted, shard))


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 40), st.sampled_from([1, 4, 16]))
@settings(max_examples=200, deadline=None)
def test_stripes_are_dealt_round_robin(num_shards, shard_length, most_rows, multiple):
    """Every shard gets as many from each, in the order of the ring, and all but its own travel."""
    length, most_rows = num_shards * shard_length, max(most_rows, multiple)
    (made,) = make_schedule(DilatedPattern.of_lengths((length,), (1,)), length, num_shards, 1, balance="stripes")
    if num_shards == 1:
        assert not made.is_dealt
        return
    one = made.in_stripes(most_rows - most_rows % multiple, multiple)
    side = one.queries
    assert side.parts % num_shards == 0
    assert side.part_rows % multiple == 0
    assert side.part_rows <= max(multiple, most_rows)
    stripes = np.arange(num_shards * side.parts).reshape(num_shards, -1)
    for shard in range(num_shards):
        holder, row = one.origin(shard, np.arange(side.num_padded_rows), side)
        stripe = stripes[holder, row // side.part_rows]
        in_order = [own[number] for own in stripes for number in range(shard, side.parts, num_shards)]
        np.testing.assert_array_equal(stripe, np.repeat(in_order, side.part_rows))
        np.testing.assert_array_equal(row % side.part_rows, np.arange(side.num_padded_rows) % side.part_rows)


def test_rings_that_deal_no_stripes_swap_halves():
    """Those of unequal size, and by default those whose shards have few rows."""
    balance = lambda length, shards, **how: [
        one.balance for one in make_schedule(DilatedPattern([Segments(length)]), 1024, shards, 1, True, **how)
    ]
    assert balance(1024, 8, balance="stripes") == ["stripes"]
    assert balance(1024, 8, balance="stripes", min_stripe_rows=16) == ["stripes"]
    assert balance(1024, 8, balance="stripes", min_stripe_rows=17) == ["zigzag"]
    assert balance(1024 // 7 * 3 + 3, 7, balance="stripes") == ["zigzag"]
    assert balance(1024, 8, balance="none") == balance(128, 8, balance="stripes") == ["none"]


def test_a_prime_number_of_segments_fills_its_tiles():
    """As many tiles as the next number that divides; the exactness of the last one, which is not full, is tested."""
    for count in (4093, 4096):
        (schedule,) = make_schedule(DilatedPattern.of_lengths((8,), (1,)), 8 * count, 1, 1)
        assert (schedule.queries.num_tiles, schedule.queries.chunks_per_tile) == (64, 64)
    (schedule,) = make_schedule(DilatedPattern.of_lengths((4,), (1,)), 92, 1, 1, max_block_rows=12)
    side = schedule.queries
    assert (side.num_chunks, side.num_full_chunks, side.num_tiles) == (23, 24, 8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branch", [Window(300), Window(1500), Segments(1000), Segments(8192)])
def test_what_neighbors_alone_see_is_not_gathered(branch, is_causal):
    """It goes to these, whatever the strategy; segments that fill devices are seen by all of their ring."""
    make = functools.partial(make_schedule, DilatedPattern([branch]), 8192, 8, 4, is_causal)
    (ring,) = make()
    (gathered,) = schedules_with(lambda size: make(ulysses_size=size), ("all_gather",), (1,), "all")
    assert gathered.is_gathered == (branch == Segments(8192))
    assert gathered == (dataclasses.replace(ring, strategy="all_gather") if gathered.is_gathered else ring)
