"""How often compilers have at once what a branch keeps, on one kind of devices."""

from typing import NamedTuple

from ringjax._schedule.schedule import BranchSchedule

LANES = 128  # of a TPU: heads whose width is no multiple of it are narrow
_PAIRS_IN_ONE_LIST = 2**36


def is_in_bands(schedule: BranchSchedule) -> bool:
    """Whether a TPU's scalar memory is too small for a list of all tiles that meet: then it takes some after others."""
    gathered = schedule.gather_size if schedule.is_gathered else 1
    return schedule.queries.num_slots * schedule.keys.num_slots * gathered > _PAIRS_IN_ONE_LIST


class Factors(NamedTuple):
    """How often what is counted is there, on one kind of devices. Of two numbers, the second is with the gradient."""

    lanes: int  # heads whose width is no multiple of it are narrow
    vector_memory: int  # bytes that compilers fill of it
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


# CPUs are counted as GPUs are.
ON_GPUS = Factors(
    lanes=1,
    vector_memory=0,
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
)
# Kernels for TPUs read heads that lie apart, and branches wait for each other.
ON_TPUS = Factors(
    lanes=LANES,
    vector_memory=104 * 2**20,
    laid_out=(0.35, 1.9),
    travelling=(1, 1.05),
    neighbours=(0.9, 1.1),
    staying=(0, 1),
    swapped=(1, 2),
    halo=(1.3, 1.2),
    one_rotation=(2.8, 1.25),
    gathered_for=(0, 1),
    gathered=(1, 1),
    own_beside_gathered=0,
)
