"""Chains: which tiles that stay a block of threads of a GPU takes, one after the other."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

MOST_LINKS = 4
PROCESSORS = 132  # of an H100 and of an H200; each has one block at a time
# How much longer the last blocks may take because some processors have none.
_MOST_LONGER = 1 / 16


class Chains(NamedTuple):
    """The tiles of a head, in chains of so many `links`.

    Of causal attention the last queries meet most keys, and the first keys most queries. Blocks begin there, with
    `is_from_last` at the last tile, so that none ends long after the others; and every other link is counted from the
    other end, so that chains are as long as each other. Blocks beside each other have tiles that follow each other:
    what these share is in the cache.
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
    """Returns chains of as many links as there may be, of one where tiles cannot be linked.

    A block begins and ends while its processor computes nothing, once for each chain. But the more links, the fewer
    blocks: all processors have to be busy to the end.
    """
    for links in range(MOST_LINKS if can_link else 1, 1, -1):
        rounds = num_heads * num_tiles / (links * PROCESSORS)
        if num_tiles % links == 0 and rounds > 1 and math.ceil(rounds) <= (1 + _MOST_LONGER) * rounds:
            return Chains(num_tiles, links, is_from_last)
    return Chains(num_tiles, 1, is_from_last)
