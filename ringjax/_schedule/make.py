"""Makes the schedules of a call: chooses the rotations of each branch by bytes sent, then by number of messages."""

import dataclasses
import functools
import math
from typing import Literal

from ringjax._pattern.branch import MAX_POSITIONS, Branch
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.schedule import Balance, BranchSchedule, Rotation, Schedules
from ringjax._schedule.side import Side

MAX_BLOCK_ROWS = 512
# The most rows of a stripe, and the fewest with which dealing is the default.
MAX_STRIPE_ROWS, MIN_STRIPE_ROWS = 512, 128


@functools.lru_cache(maxsize=1024)
def make_schedule(
    pattern: DilatedPattern,
    length: int,
    num_devices: int,
    num_kv_heads: int,
    is_causal: bool = False,
    max_block_rows: int = MAX_BLOCK_ROWS,
    key_length: int | None = None,
    query_offset: int | None = 0,
    ulysses_size: int = 1,
    balance: Balance = "zigzag",
    min_stripe_rows: int = 1,
    num_inner_devices: int | None = None,
) -> Schedules:
    """Returns the schedule of each branch for `length` queries, padded to equal shards, and `num_kv_heads` heads.

    There are `key_length` keys, as many as queries by default; `query_offset` is the position of the first query, None
    where it is known only when the program runs. Of the devices, `ulysses_size` make up a shard. Stripes have at least
    `min_stripe_rows` rows: rings with fewer take zigzag instead. If the sequence has several mesh axes, the last one
    has `num_inner_devices`, which `ulysses_size` divides.
    """
    key_length = length if key_length is None else key_length
    num_shards = num_devices // ulysses_size
    shard_length, key_shard_length = (ulysses_size * -(-tokens // num_devices) for tokens in (length, key_length))
    is_moving = query_offset is None
    if query_offset is None:  # the largest possible one: what holds for it holds for all
        query_offset = MAX_POSITIONS - num_shards * shard_length
    is_union = pattern.merge == "union" and pattern.heads == "all"
    # Sizes of branches are reduced to these bounds, within 32 bits, which changes nothing: a segment that holds all
    # tokens holds the padding too.
    stop = max(query_offset + num_shards * shard_length, num_shards * key_shard_length)
    branches = pattern.within(max(query_offset + length, key_length), num_kv_heads, stop)
    is_general = query_offset > 0 or length != key_length

    def schedule(number: int, branch: Branch) -> BranchSchedule:
        sides = functools.partial(Side, branch, num_shards=num_shards, max_block_rows=max_block_rows)
        keys = sides(key_length, key_shard_length, num_tokens=key_shard_length)
        first_token = 0 if is_moving else query_offset
        queries = sides(length, shard_length, num_tokens=shard_length, first_token=first_token, is_moving=is_moving)
        earlier = tuple(enumerate(branches[:number])) if is_union else ()
        one = BranchSchedule(
            branch,
            number,
            queries,
            keys,
            is_causal=is_causal,
            is_general=is_general,
            earlier_branches=earlier,
            ulysses_size=ulysses_size,
        )
        inner_size = num_shards if num_inner_devices is None else num_inner_devices // ulysses_size
        return _deal(_lay_ways(one).nested(inner_size), balance, min_stripe_rows)

    return tuple(schedule(number, branch) for number, branch in enumerate(branches))


def _lay_ways(one: BranchSchedule) -> BranchSchedule:
    """Returns the schedule with its rings, rotations and chunks."""
    side, branch, num_shards = one.queries, one.branch, one.num_shards
    if one.is_general:
        ring = (Rotation(1, num_shards - 1),) if num_shards > 1 else ()
        return dataclasses.replace(one, ring_size=num_shards, key_rotations=ring, query_rotations=ring)
    period = branch.period or num_shards * side.shard_length
    # Shards between two shard boundaries that are also segment boundaries share nothing with the others.
    ring_size = min(num_shards, math.lcm(period, side.shard_length) // side.shard_length)
    back, ahead = _seen_across(branch, side)
    key_rotations, query_rotations = _rotations(1, back, side), _rotations(-1, ahead, side)
    if not one.is_causal:
        key_rotations = query_rotations = key_rotations + query_rotations
    # A closed ring or open rotations, by bytes, then by messages. Segments that fill shards need a closed ring.
    of_ring = (ring_size - 1) * side.shard_length, ring_size - 1
    of_rotations = back + (0 if one.is_causal else ahead), sum(rotation.steps + 1 for rotation in key_rotations)
    if not key_rotations:
        ring_size = 1
    elif side.is_in_one_segment or of_ring < of_rotations:
        key_rotations = query_rotations = (Rotation(1, ring_size - 1),)
    one = dataclasses.replace(one, key_rotations=key_rotations, query_rotations=query_rotations, ring_size=ring_size)
    return _cut(one)


def _rotations(direction: Literal[1, -1], tokens: int, side: Side) -> tuple[Rotation, ...]:
    steps = max(0, -(-tokens // side.shard_length) - 1)
    return (Rotation(direction, steps, tokens - steps * side.shard_length),) if tokens else ()


def _seen_across(branch: Branch, side: Side) -> tuple[int, int]:
    """Returns how many tokens before a shard boundary the tokens after it see at most, and vice versa."""
    back = ahead = 0
    for shard in range(1, side.num_shards):
        boundary = min(shard * side.shard_length, side.length)
        if boundary < side.length:
            back = max(back, boundary - branch.seen(boundary)[0])
            ahead = max(ahead, min(branch.seen(boundary - 1)[1] + 1, side.length) - boundary)
    # Rounded up to whole rows of all phases, if shards are cut into phases.
    unit = branch.modulus if side.shard_length % branch.modulus == 0 else 1
    return -(-back // unit) * unit, -(-ahead // unit) * unit


def _cut(one: BranchSchedule) -> BranchSchedule:
    """Returns the schedule with shards cut into chunks."""
    branch, side = one.branch, one.queries
    if one.is_local and branch.period is not None:
        side = dataclasses.replace(side, chunks="segments")
    elif branch.modulus > 1 and side.shard_length % branch.modulus == 0:
        side = dataclasses.replace(side, chunks="phases")
    return dataclasses.replace(one, queries=side, keys=side)


def _deal(one: BranchSchedule, balance: Balance, min_stripe_rows: int) -> BranchSchedule:
    """Returns the schedule whose shards deal their rows."""
    rows = min(one.queries.chunk_rows, one.keys.chunk_rows)
    if balance == "stripes" and one.can_deal_stripes and rows >= min_stripe_rows * one.ring_size:
        return one.in_stripes(min(one.queries.max_block_rows, MAX_STRIPE_ROWS))
    return one if balance == "none" else one.in_zigzag()
