"""The schedule against the pattern, with integers alone: every pair of the pattern is computed exactly M times."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax import DilatedPattern
from ringjax._cost import work
from ringjax._schedule import BranchSchedule, make_schedule


@st.composite
def geometries(draw):
    count = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    rates = [draw(st.integers(1, length)) for length in lengths]
    pattern = tuple(lengths), tuple(rates), draw(st.sampled_from(["interleaved", "blocked", "branch"]))
    return pattern, draw(st.integers(1, 50)), draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.booleans())


def shard_tokens(branch: BranchSchedule, shard: int, offset: int, is_computed: bool = True) -> np.ndarray:
    """The tokens in all slots of a shard, where it computes or keeps them, by chunks; -1 in a slot without one."""
    chunk = np.arange(branch.num_chunks)[:, None]
    holder, slot = shard, np.arange(branch.num_blocks * branch.block_rows)
    if is_computed:
        holder, slot = branch.origin(shard, slot)
    token, is_row = branch.slot_token(holder, chunk, slot, offset)
    return np.where(is_row, token, -1)


def computed_pairs(branch: BranchSchedule, offset: int, length: int) -> np.ndarray:
    """How often the devices together compute each pair (t, s) that lies in one segment."""
    count = np.zeros((length, length), int)
    for shard in range(branch.num_shards):
        for step in range(branch.ring_size):
            if not branch.is_new(shard, step):
                continue
            queries = shard_tokens(branch, shard, offset)
            keys = shard_tokens(branch, branch.source(shard, step), offset)
            for t in (chunk[chunk >= 0] for chunk in queries):
                for s in (chunk[chunk >= 0] for chunk in keys):
                    same = t[:, None] // branch.segment_length == s[None, :] // branch.segment_length
                    # Chunks of one shard are segments: only a chunk and itself are computed.
                    is_computed = branch.num_chunks == 1 or np.array_equal(t, s)
                    assert is_computed or not same.any()
                    np.add.at(count, (t[:, None], s[None, :]), same & (s <= t[:, None]) if branch.is_causal else same)
    return count


@given(geometries())
@settings(max_examples=100, deadline=None)
def test_every_pair_is_computed_once_for_each_branch_that_holds_it(geometry):
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern.of_lengths(*geometry[0]), *geometry[1:]
    multiplicity = pattern.multiplicity(length, num_heads)
    if is_causal:
        multiplicity = np.tril(multiplicity)
    for head in range(num_heads):
        count = np.zeros((length, length), int)
        for branch in make_schedule(pattern, length, num_shards, num_heads, is_causal):
            offset = pattern.offset(head, branch.dilation_rate, num_heads, branch.number)
            computed = computed_pairs(branch, offset, length)
            shards_and_steps = itertools.product(range(num_shards), range(branch.ring_size))
            assert sum(work(branch, *each, offset) for each in shards_and_steps) == computed.sum()
            count += computed
        np.testing.assert_array_equal(count, multiplicity[head])


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_each_kept_token_has_one_slot_on_its_own_shard(geometry):
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern.of_lengths(*geometry[0]), *geometry[1:]
    for branch in make_schedule(pattern, length, num_shards, num_heads, is_causal):
        fullest = 0
        for offset in range(branch.dilation_rate):
            for shard in range(num_shards):
                tokens = shard_tokens(branch, shard, offset, is_computed=False)
                fullest = max(fullest, (tokens >= 0).sum(axis=1).max())
                own = np.arange(shard * branch.shard_length, (shard + 1) * branch.shard_length)
                kept = own[branch.is_kept(own, offset)]
                np.testing.assert_array_equal(tokens[tokens >= 0], kept)
                chunk, slot = branch.token_slot(shard, kept, offset)
                np.testing.assert_array_equal(tokens[chunk, slot], kept)
        # No slot is there for nothing, but where the padding of the length takes rows away.
        assert fullest == branch.num_rows or length % branch.chunk_length or length < num_shards * branch.shard_length


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_rings_are_made_of_neighbours_and_permuted_in_cycles(geometry):
    pattern, length, num_shards, num_heads, is_causal = DilatedPattern.of_lengths(*geometry[0]), *geometry[1:]
    for branch in make_schedule(pattern, length, num_shards, num_heads, is_causal):
        for shard in range(num_shards):
            first, size = branch.ring(shard)
            assert first <= shard < first + size <= num_shards
            assert size == branch.ring_size or (first + size == num_shards and size < branch.ring_size)
            sources = [branch.source(shard, step) for step in range(size)]
            assert sorted(sources) == list(range(first, first + size))
            # A segment never reaches over the boundary of two rings.
            assert first * branch.shard_length % branch.segment_length == 0
        for hops in (1, 1 - branch.ring_size):
            sources, destinations = zip(*branch.permutation(hops), strict=True)
            assert sorted(sources) == sorted(destinations) == list(range(num_shards))
        # One rotation after another brings what `source` says.
        held = list(range(num_shards))
        rotation = {destination: source for source, destination in branch.permutation(1)}
        for step in range(branch.ring_size):
            assert held == [branch.source(shard, step) for shard in range(num_shards)]
            if step < branch.ring_size - 1:
                held = [held[rotation[shard]] for shard in range(num_shards)]
        # The way home from the last step.
        home = {destination: source for source, destination in branch.permutation(1 - branch.ring_size)}
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
    (branch,) = make_schedule(DilatedPattern.of_lengths((segment_length,), (1,)), 16 * num_shards, num_shards, 1)
    assert branch.ring_size == ring_size
    assert branch.chunk_length == chunk_length


def test_only_kept_rows_have_slots():
    (branch,) = make_schedule(DilatedPattern.of_lengths((4096,), (16,)), 8192, 8, 4)
    assert branch.ring_size == 4
    assert branch.num_rows == 1024 // 16
    assert branch.num_tiles * branch.chunks_per_tile * branch.block_rows == 64


@pytest.mark.parametrize(("segment_length", "rate"), [(8192, 1), (8192, 3), (64, 1), (7, 2), (640, 1)])
def test_tiles_hold_all_slots_and_little_more(segment_length, rate):
    (branch,) = make_schedule(DilatedPattern.of_lengths((segment_length,), (rate,)), 8192, 2, 1)
    slots = branch.num_blocks * branch.block_rows
    assert branch.num_rows <= slots < branch.num_rows + branch.num_blocks
    assert branch.block_rows * branch.chunks_per_tile <= 512
    assert branch.num_tiles * branch.chunks_per_tile == branch.num_chunks * branch.num_blocks


def test_numbers_beyond_the_sequence_stay_small():
    (branch,) = make_schedule(DilatedPattern.of_lengths((10**12,), (10**11,)), 100, 8, 3)
    assert max(branch.segment_length, branch.dilation_rate) < 2**31
    assert branch.num_rows == 1
    expected = DilatedPattern.of_lengths((10**12,), (10**11,)).multiplicity(100, 3)
    for head in range(3):
        np.testing.assert_array_equal(computed_pairs(branch, head, 100), expected[head])


def test_work_does_not_depend_on_the_layout():
    # The number of hops is that of the shards that share a segment, and no more.
    for num_shards in (1, 2, 4, 8, 16):
        (branch,) = make_schedule(DilatedPattern.of_lengths((256,), (2,)), 1024, num_shards, 1)
        assert branch.ring_size == max(1, math.ceil(256 / (1024 / num_shards)))


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("ring_size", [2, 3, 4, 5, 8, 16])
def test_causal_work_is_the_same_on_every_device_in_every_step(ring_size, rate):
    shard_length = 512
    length = 2 * ring_size * shard_length
    pattern = DilatedPattern.of_lengths((ring_size * shard_length,), (rate,))
    (branch,) = make_schedule(pattern, length, 2 * ring_size, 1, is_causal=True)
    assert branch.ring_size == ring_size
    steps = [[work(branch, shard, step) for shard in range(2 * ring_size)] for step in range(ring_size)]
    critical_path = sum(map(max, steps))
    assert critical_path <= 1.02 * sum(map(sum, steps)) / (2 * ring_size)
    # Not along the path alone: in each step all devices do exactly the same.
    assert all(len(set(step)) == 1 for step in steps)


def test_swapping_is_its_own_inverse_and_stays_in_the_ring():
    for num_shards, segment_length in ((8, 64), (8, 24), (7, 32), (5, 1000)):
        (branch,) = make_schedule(
            DilatedPattern.of_lengths((segment_length,), (1,)), 8 * num_shards, num_shards, 1, True
        )
        assert branch.is_balanced
        partners = dict(branch.swap_permutation())
        for shard, partner in partners.items():
            assert partners[partner] == shard
            assert branch.ring(partner) == branch.ring(shard)
        origins = {branch.origin(shard, slot) for shard in range(num_shards) for slot in range(branch.num_slots)}
        assert origins == {(shard, slot) for shard in range(num_shards) for slot in range(branch.num_slots)}


def test_a_prime_number_of_segments_fills_its_tiles():
    """As many tiles as the next number that divides; the exactness of the last one, which is not full, is tested."""
    for count in (4093, 4096):
        (branch,) = make_schedule(DilatedPattern.of_lengths((8,), (1,)), 8 * count, 1, 1)
        assert (branch.num_tiles, branch.chunks_per_tile) == (64, 64)
    (branch,) = make_schedule(DilatedPattern.of_lengths((4,), (1,)), 92, 1, 1, max_block_rows=12)
    assert (branch.num_chunks, branch.num_full_chunks, branch.num_tiles) == (23, 24, 8)
