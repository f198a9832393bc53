"""The schedule: which rows each shard keeps, which shards form a ring, and where rows are computed, in integers alone.

Every function here uses arithmetic operators only, so that the same line serves Python integers, NumPy arrays (the
tests) and traced JAX integers (the shard's own number inside shard_map).
"""

import dataclasses
import functools
import math
from typing import Any

from ringjax._pattern import MAX_POSITIONS, DilatedPattern

MAX_BLOCK_ROWS = 512


def remainder(number: Any, divisor: Any) -> Any:
    """Returns what is left of a number that is not negative; jax's own operator is a dozen operations."""
    return number - number // divisor * divisor


@dataclasses.dataclass(frozen=True)
class BranchSchedule:
    """One branch of a pattern on a sequence of `length` tokens in `num_shards` shards of `shard_length` tokens.

    Tokens are named by their positions, from `first_token` on. Where the keys lie otherwise than the queries, this is
    the queries' schedule, and `other_keys` the keys'. In a union, pairs of the `earlier` branches are left out: their
    numbers, segment lengths and rates.

    The tokens of a shard are cut into chunks: its segments, where the segments lie inside shards, else the whole shard.
    Each chunk holds `num_rows` slots for the rows that a head keeps; a slot without a row is masked. Chunks attend to
    themselves and, in a ring, to the chunks of the other shards that share a segment with them.

    Where `is_moving`, the first token is known only when the program runs: see `at`.
    """

    segment_length: int
    dilation_rate: int
    length: int
    shard_length: int
    num_shards: int
    is_causal: bool = False
    max_block_rows: int = MAX_BLOCK_ROWS
    implementation: str = "xla"
    number: int = 0
    first_token: Any = 0
    earlier: tuple[tuple[int, int, int], ...] = ()
    is_general: bool = False
    is_moving: bool = False
    other_keys: "BranchSchedule | None" = None

    def at(self, first_token: Any) -> "BranchSchedule":
        """Returns the schedule with this first token, a traced one too: no shape depends on it where it `is_moving`."""
        return dataclasses.replace(self, first_token=first_token) if self.is_moving else self

    @property
    def of_keys(self) -> "BranchSchedule":
        """The schedule of the keys."""
        return self.other_keys or self

    # Where queries and keys lie differently, all shards form one ring, and each is one chunk.

    # Rings: shards between two boundaries that are boundaries of segments as well share nothing with the others.

    @property
    def ring_size(self) -> int:
        """The number of consecutive shards that form a ring, g; the last ring may be shorter."""
        return (
            self.num_shards
            if self.is_general
            else min(self.num_shards, math.lcm(self.segment_length, self.shard_length) // self.shard_length)
        )

    def ring(self, shard: Any) -> tuple[Any, Any]:
        """Returns the first shard and the number of shards of the ring that a shard belongs to."""
        if self.ring_size == self.num_shards:
            return shard - shard, self.ring_size  # zero, of the kind that the shard's number is
        rest = self.num_shards % self.ring_size
        in_short_ring = shard // (self.num_shards - rest) if rest else 0
        return shard // self.ring_size * self.ring_size, self.ring_size - in_short_ring * (self.ring_size - rest)

    def source(self, shard: Any, step: Any) -> Any:
        """Returns the shard whose rows are at `shard` after `step` rotations."""
        if isinstance(step, int) and step == 0:
            return shard
        first, size = self.ring(shard)
        return first + remainder(shard - first + self.ring_size * size - step, size)

    def is_new(self, shard: Any, step: Any) -> Any:
        """Returns whether the rows that are at `shard` after `step` rotations are there for the first time."""
        return True if self.num_shards % self.ring_size == 0 else step < self.ring(shard)[1]

    def permutation(self, hops: int) -> tuple[tuple[int, int], ...]:
        """Returns the (source, destination) pairs that move every shard's rows by `hops` shards along its ring."""
        return tuple((self.source(shard, hops), shard) for shard in range(self.num_shards))

    @property
    def gather_size(self) -> int:
        """The number of consecutive shards that gather together: a ring; all shards where the last ring is shorter."""
        return self.num_shards if self.num_shards % self.ring_size else self.ring_size

    @property
    def gather_groups(self) -> list[list[int]]:
        """The shards that gather together."""
        size = self.gather_size
        return [list(range(first, first + size)) for first in range(0, self.num_shards, size)]

    # Rows: the kept tokens of an offset are numbered through the whole sequence. The rank of a token counts the kept
    # tokens before it, which makes both directions arithmetic, whatever the geometry.

    def rank(self, token: Any, offset: Any) -> Any:
        """Returns the number of tokens before `token` that a head of this offset keeps."""
        return (token // self.segment_length) * self.kept(self.segment_length, offset) + self.kept(
            remainder(token, self.segment_length), offset
        )

    def token(self, rank: Any, offset: Any) -> Any:
        """Returns the kept token of the given rank."""
        kept = self.kept(self.segment_length, offset)
        return (rank // kept) * self.segment_length + offset + remainder(rank, kept) * self.dilation_rate

    def is_kept(self, token: Any, offset: Any) -> Any:
        """Returns whether a head of this offset keeps the token."""
        in_segment = remainder(token, self.segment_length)
        return (remainder(in_segment, self.dilation_rate) == offset) & (token < self.stop)

    def first(self, shard: Any, chunk: Any = 0) -> Any:
        """Returns the position at which a shard's chunk begins."""
        return self.first_token + (shard * self.num_chunks + chunk) * self.chunk_length

    @property
    def stop(self) -> Any:
        """The position after the last token."""
        return self.first_token + self.length

    def kept(self, tokens: Any, offset: Any) -> Any:
        """Returns the number of tokens that a head of this offset keeps of the first `tokens` of a segment."""
        return (tokens + self.dilation_rate - 1 - offset) // self.dilation_rate

    # Chunks and slots.

    @property
    def chunk_length(self) -> int:
        """The number of tokens of a chunk."""
        is_cut = self.ring_size == 1 and not self.is_general
        return min(self.segment_length, self.shard_length) if is_cut else self.shard_length

    @property
    def num_chunks(self) -> int:
        """The number of chunks of a shard."""
        return -(-self.shard_length // self.chunk_length)

    @functools.cached_property
    def num_rows(self) -> int:
        """The number of slots of a chunk: the most rows that any head keeps of any chunk."""
        if self.is_moving:
            return self._most_kept(self.chunk_length)
        chunks = range(math.lcm(self.segment_length, self.chunk_length) // self.chunk_length)
        chunks = chunks[: self.num_shards * self.num_chunks]
        starts = [self.first(0, chunk) for chunk in chunks]
        # An offset beyond the first chunk keeps one row at most, as offset 0 does of one that begins at 0.
        offsets = self.dilation_rate if self.first_token else min(self.dilation_rate, self.chunk_length + 1)
        return max(
            self.rank(start + self.chunk_length, offset) - self.rank(start, offset)
            for start in starts
            for offset in range(offsets)
        )

    def _most_kept(self, tokens: int) -> int:
        """Returns a bound of the rows that any head keeps of so many tokens, wherever they begin."""
        segments, rest = divmod(tokens, self.segment_length)
        # The rest lies in two segments at most, of each of which a part of l tokens has ceil(l / rate) kept ones.
        of_rest = rest if rest < 2 else (rest - 2) // self.dilation_rate + 2
        is_one_segment = tokens <= self.segment_length and self.segment_length >= MAX_POSITIONS
        return self.kept(tokens, 0) if is_one_segment else segments * self.kept(self.segment_length, 0) + of_rest

    def slot_token(self, shard: Any, chunk: Any, slot: Any, offset: Any) -> tuple[Any, Any]:
        """Returns the token in a slot of a shard's chunk, and whether there is one."""
        start = self.first(shard, chunk)
        if self.is_strided:
            token = start + offset + slot * self.dilation_rate
        else:
            token = self.token(self.rank(start, offset) + slot, offset)
        return token, (token < start + self.chunk_length) & (token < self.stop)

    def token_slot(self, shard: Any, token: Any, offset: Any) -> tuple[Any, Any]:
        """Returns the chunk and the slot of a kept token of the shard."""
        chunk = (token - self.first_token - shard * self.shard_length) // self.chunk_length
        return chunk, self.rank(token, offset) - self.rank(self.first(shard, chunk), offset)

    # Tiles: a chunk's slots are computed in blocks; short chunks share a tile.

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a chunk: even where its halves go to different shards."""
        halves = 2 if self.is_balanced else 1
        return halves * -(-self.num_rows // (halves * self.max_block_rows))

    @property
    def block_rows(self) -> int:
        """The number of slots of a block."""
        return -(-self.num_rows // self.num_blocks)

    @functools.cached_property
    def chunks_per_tile(self) -> int:
        """The number of chunks that one tile computes side by side.

        A divisor of the number of chunks, if there is one that fills half of a tile; else the last tile is not full.
        """
        most = min(max(1, self.max_block_rows // self.block_rows), self.num_chunks)
        divisor = max(count for count in range(1, most + 1) if self.num_chunks % count == 0)
        num_tiles = -(-self.num_chunks // most)
        return divisor if 2 * divisor >= most else -(-self.num_chunks // num_tiles)

    @property
    def num_full_chunks(self) -> int:
        """The number of chunks that full tiles have: those beyond the chunks of a shard hold no rows."""
        return -(-self.num_chunks // self.chunks_per_tile) * self.chunks_per_tile

    @property
    def num_tiles(self) -> int:
        """The number of tiles of a shard."""
        return self.num_full_chunks // self.chunks_per_tile * self.num_blocks

    @property
    def num_groups(self) -> int:
        """The number of equal parts of a shard that have nothing to do with each other: the chunks of one tile each."""
        is_exact = self.num_full_chunks * self.chunk_length == self.shard_length
        return self.num_chunks // self.chunks_per_tile if is_exact else 1

    def of_group(self) -> "BranchSchedule":
        """Returns the schedule in which each group of each shard is a shard of its own."""
        length, shards = self.shard_length // self.num_groups, self.num_shards * self.num_groups
        return dataclasses.replace(self, shard_length=length, num_shards=shards)

    @property
    def num_slots(self) -> int:
        """The number of slots of a shard."""
        return self.num_tiles * self.chunks_per_tile * self.block_rows

    @property
    def is_strided(self) -> bool:
        """Whether every head keeps one token, its offset, of each `dilation_rate` tokens of a shard, and no other."""
        return (
            not self.is_moving
            and self.num_chunks * self.chunk_length == self.shard_length
            and self.chunk_length % self.dilation_rate == 0
            and self.first_token % self.dilation_rate == 0
            and (self._is_one_segment or (self.ring_size == 1 and not self.is_general))
        )

    @property
    def is_dense(self) -> bool:
        """Whether every slot holds a row, and rows of one chunk, or of two shards of a ring, all share a segment."""
        is_full = (
            self.num_slots == self.num_chunks * self.num_rows and self.num_shards * self.shard_length == self.length
        )
        return is_full and self.is_strided

    # Balance: in a causal ring a later shard has more keys to see, in each step all or nothing. So each shard cuts its
    # slots in halves, of which shard j of g holds number 2j and 2j + 1, and swaps the second with shard g - 1 - j. It
    # then has the halves 2j and 2(g-1-j) + 1, in order. Of two shards j and i, half 2j is after 2i, or 2(g-1-j) + 1 is
    # after 2(g-1-i) + 1, never both, and likewise for the other two pairs: in each step each shard computes two whole
    # halves, in the first one whole half and two triangles.

    @property
    def _is_one_segment(self) -> bool:
        return not self.is_moving and self.segment_length >= self.first_token + self.ring_size * self.shard_length

    @property
    def is_balanced(self) -> bool:
        """Whether shards swap halves to compute."""
        return self.is_causal and self.ring_size > 1 and self._is_one_segment and not self.is_general

    def partner(self, shard: Any) -> Any:
        """Returns the shard with which a shard swaps the second half of its slots."""
        first, size = self.ring(shard)
        return first + (size - 1 - (shard - first))

    def is_late(self, shard: Any) -> Any:
        """Returns whether a shard's own half comes after the one that it gets from its partner."""
        first, size = self.ring(shard)
        return 2 * (shard - first) + 1 > size

    def origin(self, shard: Any, slot: Any) -> tuple[Any, Any]:
        """Returns the shard and the slot that hold what `shard` computes in `slot`."""
        if not self.is_balanced:
            return shard, slot
        half = self.num_slots // 2
        is_swapped = (slot >= half) != self.is_late(shard)
        return shard + is_swapped * (self.partner(shard) - shard), remainder(slot, half) + is_swapped * half

    def swap_permutation(self) -> tuple[tuple[int, int], ...]:
        """Returns the (source, destination) pairs that swap the halves."""
        return tuple((shard, self.partner(shard)) for shard in range(self.num_shards))


@functools.lru_cache(maxsize=1024)
def make_schedule(
    pattern: DilatedPattern,
    length: int,
    num_shards: int,
    num_kv_heads: int,
    is_causal: bool = False,
    max_block_rows: int = MAX_BLOCK_ROWS,
    key_length: int | None = None,
    query_offset: int | None = 0,
) -> tuple[BranchSchedule, ...]:
    """Returns the schedule of each branch for `length` queries, padded to equal shards, and `num_kv_heads` heads.

    There are `key_length` keys, as many as queries by default; `query_offset` is the position of the first query, None
    where it is known only when the program runs.
    """
    key_length = length if key_length is None else key_length
    shard_length, key_shard_length = -(-length // num_shards), -(-key_length // num_shards)
    is_moving = query_offset is None
    if query_offset is None:  # as far as the last position: what holds there holds everywhere
        query_offset = MAX_POSITIONS - num_shards * shard_length
    is_general = query_offset > 0 or length != key_length
    is_union = pattern.merge == "union" and pattern.heads == "all"
    # Beyond these numbers nothing changes: a segment that holds all tokens holds the padding too, within 32 bits.
    stop = max(query_offset + num_shards * shard_length, num_shards * key_shard_length)
    end = max(query_offset + length, key_length)
    most = max(stop, num_kv_heads, len(pattern.branches))
    branches: list[BranchSchedule] = []
    for number, segments in enumerate(pattern.branches):
        rate = min(segments.rate, most)
        branch = BranchSchedule(
            segment_length=max(stop, rate) if segments.length >= end else segments.length,
            dilation_rate=rate,
            length=length,
            shard_length=shard_length,
            num_shards=num_shards,
            is_causal=is_causal,
            max_block_rows=max_block_rows,
            number=number,
            first_token=0 if is_moving else query_offset,
            earlier=tuple((one.number, one.segment_length, one.dilation_rate) for one in branches if is_union),
            is_general=is_general,
            is_moving=is_moving,
        )
        if is_general:
            keys = dataclasses.replace(
                branch, length=key_length, shard_length=key_shard_length, first_token=0, is_moving=False
            )
            branch = dataclasses.replace(branch, other_keys=keys)
        branches.append(branch)
    return tuple(branches)
