"""Chains: the stationary tiles that a thread block of a GPU takes, one after the other."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

MOST_LINKS = 4
PROCESSORS = 132  # of an H100 and of an H200; each runs one thread block at a time
# How much longer a launch may take because some processors are idle during the last thread blocks.
_MOST_LONGER = 1 / 16


class Chains(NamedTuple):
    """The tiles of a head, in chains of `links` tiles.

    In causal attention, the last queries attend to the most keys, and the most queries to the first keys. The first
    thread blocks start there, at the last tile if `is_from_last`, so that none ends long after the others. Every other
    link is counted from the other end, so that chains take equally long. Neighboring thread blocks have neighboring
    tiles, which share streamed tiles in the cache.
    """

    num_tiles: int
    links: int
    is_from_last: bool

    @property
    def num_chains(self) -> int:
        """How many chains there are."""
        return self.num_tiles // self.links

    @property
    def tiles(self) -> Int[np.ndarray, "chains links"]:
        """The numbers of the tiles."""
        rounds = np.arange(self.num_tiles, dtype=np.int32).reshape(self.links, -1)
        rounds[1::2] = rounds[1::2, ::-1]
        return self.num_tiles - 1 - rounds.T if self.is_from_last else rounds.T


def make_chains(num_tiles: int, num_heads: int, is_from_last: bool, can_link: bool) -> Chains:
    """Returns chains of as many links as possible, or of one if tiles cannot be linked.

    A processor is idle while a thread block starts and ends, once for each chain. But more links make fewer thread
    blocks, and these have to keep all processors busy to the end.
    """
    for links in range(MOST_LINKS if can_link else 1, 1, -1):
        rounds = num_heads * num_tiles / (links * PROCESSORS)
        if num_tiles % links == 0 and rounds > 1 and math.ceil(rounds) <= (1 + _MOST_LONGER) * rounds:
            return Chains(num_tiles, links, is_from_last)
    return Chains(num_tiles, 1, is_from_last)
