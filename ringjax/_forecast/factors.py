"""How often compilers have at once what a branch keeps, on one kind of devices."""

from typing import NamedTuple

LANES = 128  # of a TPU: heads whose width is no multiple of it are narrow


class Factors(NamedTuple):
    """How often what is counted is there, on one kind of devices. Of two numbers, the second is with the gradient."""

    lanes: int  # heads whose width is no multiple of it are narrow
    of_kernel: int  # bytes of a memory of its own
    # Rows that do not travel, laid out anew: None where kernels read the arguments themselves, of which the backward
    # copies some, and rows that were taken.
    laid_out: tuple[float, float] | None
    travelling: tuple[float, float]  # what stays and what comes by in a ring
    neighbours: tuple[float, float]  # the same along hops
    staying: tuple[float, float]  # rows that stay, beside the arguments
    swapped: tuple[float, float]  # queries of whole shards whose halves are swapped
    halo: tuple[float, float]
    one_rotation: tuple[float, float]  # what comes by where nothing rotates on: in a loop it is there twice
    gathered_for: tuple[float, float]  # queries beside which keys and values of whole segments are gathered
    gathered: tuple[float, float]  # these, and their sums, with the gradient
    own_beside_gathered: float  # those of a device, as they are sent, without
    # Of what a branch keeps, the share that is there as well when the one that keeps most is computed: of rows in
    # another order, of those with neighbours, which are on their way from the beginning, of XLA's tiles, where all rows
    # of a shard are sent and else, of those that exchange all tokens, and of others; and the most of any of these where
    # that one gathers keys.
    share_sorted: float
    share_of_neighbours: tuple[float, float]
    share_of_tiles: tuple[float, float]
    share_exchanged: float
    share: float
    share_beside_gathered: float
    keeps_outputs: bool  # those of branches, until they are added
    sums: float  # those of all tokens, to which branches are added one by one; and where they exchange rows
    sums_exchanged: float


# CPUs are counted as GPUs are.
ON_GPUS = Factors(
    lanes=1,
    of_kernel=0,
    laid_out=None,
    travelling=(1, 1),
    neighbours=(1, 1.05),
    staying=(0, 1),
    swapped=(1.5, 2),
    halo=(2, 1.35),
    one_rotation=(1, 0.75),
    gathered_for=(0.3, 0.7),
    gathered=(0.55, 0.8),
    own_beside_gathered=1,
    share_sorted=1,
    share_of_neighbours=(0.55, 0.65),
    share_of_tiles=(0.7, 0.3),
    share_exchanged=0.05,
    share=0.65,
    share_beside_gathered=0.35,
    keeps_outputs=True,
    sums=0.2,
    sums_exchanged=0,
)
# Kernels for TPUs read heads that lie apart, and branches wait for each other.
ON_TPUS = Factors(
    lanes=LANES,
    of_kernel=2**24,
    laid_out=(0.25, 2.3),
    travelling=(1, 1.1),
    neighbours=(1, 1.1),
    staying=(0, 1),
    swapped=(1, 2),
    halo=(1.15, 1.15),
    one_rotation=(2.6, 1.2),
    gathered_for=(0, 0.5),
    gathered=(1.5, 0.47),
    own_beside_gathered=0,
    share_sorted=0.6,
    share_of_neighbours=(0.2, 0.15),
    share_of_tiles=(0.7, 0.3),
    share_exchanged=0.125,
    share=0.2,
    share_beside_gathered=1,
    keeps_outputs=False,
    sums=0.53,
    sums_exchanged=1,
)
