"""One side of a branch, its queries or its keys: from tokens to padded rows, and from these to tiles, in integers.

As in the kinds of branches, only arithmetic operators are used, for Python, NumPy and traced JAX integers.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import numpy as np

from ringjax._pattern.branch import Branch, remainder

# Rows are counted for each pair of a chunk's start and an offset; for more pairs than this, a bound replaces the count.
_MOST_STARTS = 2**22


@dataclasses.dataclass(frozen=True)
class Side:
    """The rows of a branch on a sequence of `length` tokens in `num_shards` shards of `shard_length` tokens.

    A token is its position, from `first_token` on, which is known only when the program runs if the side `is_moving`,
    see `at`. The side has the rows of `num_tokens` tokens of each shard, from its token `begin` on.

    These tokens are cut into chunks: one (`"whole"`), `"segments"` that lie inside the shard, or `"phases"`, tokens a
    rate apart. A chunk attends to itself and, on other shards, to the chunk of its number. It has `chunk_rows` padded
    rows for the rows that a head keeps; padding is masked. The rows of a chunk are computed in blocks of a multiple of
    `row_multiple` rows, in each of its equal `parts`, which may go to different shards; short chunks share a tile.
    """

    branch: Branch
    length: int
    shard_length: int
    num_shards: int
    max_block_rows: int
    first_token: Any = 0
    is_moving: bool = False
    begin: int = 0
    num_tokens: int = 0
    chunks: Literal["whole", "segments", "phases"] = "whole"
    parts: int = 1
    row_multiple: int = 1
    of_tile: int | None = None  # the chunks per tile, if they have to match other tiles of the shard

    def at(self, first_token: Any) -> "Side":
        """Returns the side with this first token if it `is_moving`: no shape depends on it, so it may be traced."""
        return dataclasses.replace(self, first_token=first_token) if self.is_moving else self

    def part(self, begin: int, num_tokens: int) -> "Side":
        """Returns the rows of some of each shard's tokens, in tiles that match those of all its tokens."""
        return dataclasses.replace(self, begin=begin, num_tokens=num_tokens, of_tile=self.chunks_per_tile)

    def in_two_parts(self) -> tuple["Side", ...]:
        """Returns the rows among the first and the last half of each shard's tokens."""
        unit = self.step if self.chunks == "phases" else 1
        half = self.num_tokens // (2 * unit) * unit
        return tuple(
            self.part(begin, num_tokens)
            for begin, num_tokens in ((0, half), (half, self.num_tokens - half))
            if num_tokens
        )

    # Tokens.

    def first(self, shard: Any, chunk: Any = 0) -> Any:
        """Returns the position at which a shard's chunk begins."""
        return self.first_token + (shard * self.shard_length + (self.begin + chunk * self._chunk_distance))

    @property
    def stop(self) -> Any:
        """The position after the last token."""
        return self.first_token + self.length

    def is_kept(self, token: Any, offset: Any) -> Any:
        """Returns whether a head of this offset keeps the token."""
        return self.branch.keeps(token, offset) & (token < self.stop)

    # Chunks and padded rows.

    @property
    def chunk_length(self) -> int:
        """The number of tokens that a chunk spans."""
        return (
            min(self.branch.period or self.num_tokens, self.num_tokens)
            if self.chunks == "segments"
            else self.num_tokens
        )

    @property
    def _chunk_distance(self) -> int:
        return 1 if self.chunks == "phases" else self.chunk_length

    @property
    def num_chunks(self) -> int:
        """The number of chunks of a shard."""
        return self.branch.modulus if self.chunks == "phases" else -(-self.num_tokens // self.chunk_length)

    @property
    def step(self) -> int:
        """The distance, in tokens, between the rows of a strided chunk."""
        return self.branch.modulus if self.chunks == "phases" else self.branch.offset_rate

    @functools.cached_property
    def chunk_rows(self) -> int:
        """The most rows that any head keeps of any chunk: a chunk has a padded row for each."""
        if self.chunks == "phases":
            return self.num_tokens // self.step
        period, rate = self.branch.period or 1, self.branch.offset_rate
        # Chunk starts repeat with the period. Chunks that are segments all start where a segment does.
        num_starts = 1 if self.chunks == "segments" else math.lcm(period, self.shard_length) // self.shard_length
        num_starts = min(num_starts, self.num_shards)
        if self.is_moving or rate == 1 or num_starts * rate > _MOST_STARTS:
            return self.branch.most_kept(self.chunk_length)
        start, offset = self.first(np.arange(num_starts))[:, None], np.arange(rate)
        return int((self.branch.rank(start + self.chunk_length, offset) - self.branch.rank(start, offset)).max())

    def row_token(self, shard: Any, chunk: Any, row: Any, offset: Any) -> tuple[Any, Any]:
        """Returns the token in a padded row of a shard's chunk, and whether there is one."""
        start = self.first(shard, chunk)
        if self.is_strided:
            token = start + offset + row * self.step
        else:
            token = self.branch.token(self.branch.rank(start, offset) + row, offset)
        return token, (token < start + self.chunk_length) & (token < self.stop)

    def token_row(self, shard: Any, token: Any, offset: Any) -> tuple[Any, Any]:
        """Returns the chunk and the padded row of a kept token of the shard."""
        local = token - self.first(shard)
        if self.chunks == "phases":
            return remainder(local, self.step), local // self.step
        chunk = local // self.chunk_length
        return chunk, self.branch.rank(token, offset) - self.branch.rank(self.first(shard, chunk), offset)

    @property
    def is_strided(self) -> bool:
        """Whether a head keeps exactly one of each `step` tokens of a chunk, the one at its offset."""
        if self.chunks == "phases" or self.step == 1:
            return True
        lengths = self.shard_length, self.num_tokens, self.chunk_length, self.begin, self.first_token
        is_aligned = not self.is_moving and all(length % self.step == 0 for length in lengths)
        # Segments start at multiples of the step, or there is only one.
        return is_aligned and (self.is_in_one_segment or (self.branch.period or 0) % self.step == 0)

    @property
    def is_cut_evenly(self) -> bool:
        """Whether the last chunk of a shard is as long as the others."""
        return self.chunks == "phases" or self.num_chunks * self.chunk_length == self.num_tokens

    @property
    def is_in_one_segment(self) -> bool:
        """Whether each shard lies in one period of the branch."""
        if self.is_moving or self.branch.period is None:
            return False
        is_filled = not self.first_token and self.branch.period % self.shard_length == 0
        return is_filled or self.branch.period >= self.first_token + self.num_shards * self.shard_length

    @property
    def is_full(self) -> bool:
        """Whether no row of any shard is padding."""
        has_no_padding = self.num_chunks * self.chunk_rows == self.num_padded_rows
        is_divided = self.num_shards * self.shard_length == self.length
        return is_divided and has_no_padding and self.is_strided and self.is_cut_evenly

    # Tiles.

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a chunk."""
        return self.parts * -(-self.chunk_rows // (self.parts * self.max_block_rows))

    @property
    def block_rows(self) -> int:
        """The number of padded rows of a block."""
        return self.row_multiple * -(-self.chunk_rows // (self.row_multiple * self.num_blocks))

    @property
    def part_rows(self) -> int:
        """The number of padded rows of a part of a chunk."""
        return self.num_blocks // self.parts * self.block_rows

    @functools.cached_property
    def chunks_per_tile(self) -> int:
        """The number of chunks that one tile computes side by side.

        A divisor of the number of chunks, if there is one that fills half of a tile; else the last tile is not full.
        """
        if self.of_tile is not None:
            return self.of_tile
        most = min(max(1, self.max_block_rows // self.block_rows), self.num_chunks)
        divisor = _greatest_divisor(self.num_chunks, most)
        num_tiles = -(-self.num_chunks // most)
        return divisor if 2 * divisor >= most else -(-self.num_chunks // num_tiles)

    @property
    def num_full_chunks(self) -> int:
        """The number of chunks of all tiles if these are full: chunks beyond those of a shard hold no rows."""
        return -(-self.num_chunks // self.chunks_per_tile) * self.chunks_per_tile

    @property
    def num_tiles(self) -> int:
        """The number of tiles of a shard."""
        return self.num_full_chunks // self.chunks_per_tile * self.num_blocks

    @property
    def num_tile_groups(self) -> int:
        """The number of groups of tiles with the same chunks: no group attends to another."""
        return self.num_tiles // self.num_blocks

    @property
    def num_padded_rows(self) -> int:
        """The number of padded rows of a shard."""
        return self.num_tiles * self.chunks_per_tile * self.block_rows

    @property
    def num_groups(self) -> int:
        """The number of equal parts of a shard that do not attend to each other, each with the chunks of one tile."""
        is_cut = self.chunks == "segments" and self.num_full_chunks * self.chunk_length == self.num_tokens
        return self.num_chunks // self.chunks_per_tile if is_cut else 1

    def in_groups(self, least_tokens: int) -> "Side":
        """Returns the side in the most equal groups of at least so many tokens, or in one."""
        if self.chunks != "segments":
            return self
        num_groups = _greatest_divisor(self.num_chunks, max(1, self.num_chunks * self.chunk_length // least_tokens))
        return dataclasses.replace(self, of_tile=self.num_chunks // num_groups)

    def in_stripes(self, num_shards: int, most_rows: int, multiple: int) -> "Side":
        """Returns the side in stripes of at most so many rows, as many for each of the shards that share them.

        The rows of a stripe are a multiple of `multiple`. Padding adds at most an eighth where such stripes exist.
        """
        rows = self.chunk_rows
        count = -(-rows // (num_shards * most_rows))  # the stripes that a shard has for each
        while (size := multiple * -(-rows // (multiple * num_shards * count))) > multiple:
            if 8 * num_shards * count * size <= 9 * rows:
                break
            count += 1
        return dataclasses.replace(self, parts=num_shards * count, row_multiple=multiple)

    def of_devices(self, ulysses_size: int) -> "Side":
        """Returns the side on which each device of a shard is a shard of its own, with one whole chunk."""
        length, count = self.shard_length // ulysses_size, self.num_shards * ulysses_size
        return dataclasses.replace(
            self,
            shard_length=length,
            num_tokens=length,
            num_shards=count,
            chunks="whole",
            parts=1,
            row_multiple=1,
            of_tile=None,
        )

    def of_group(self) -> "Side":
        """Returns the side on which each group of each shard is a shard of its own."""
        length = self.shard_length // self.num_groups
        return dataclasses.replace(
            self, shard_length=length, num_tokens=length, num_shards=self.num_shards * self.num_groups
        )


def _greatest_divisor(number: int, most: int) -> int:
    """Returns the greatest divisor of a number that is at most so much."""
    pairs = ((count, number // count) for count in range(1, math.isqrt(number) + 1) if number % count == 0)
    return max(divisor for pair in pairs for divisor in pair if divisor <= most)
