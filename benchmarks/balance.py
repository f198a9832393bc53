"""How evenly the steps of a ring share the pairs of packed documents, by count: no program runs.

In each step all devices wait for the one with the most active blocks. So a ring takes the sum, over its steps, of the
most blocks of a device; the ideal is an equal share of all blocks.
"""

import functools
from typing import Any

import numpy as np

from benchmarks.timing import save
from ringjax import DilatedPattern, Segments
from ringjax._schedule.make import MAX_BLOCK_ROWS, make_schedule
from ringjax._schedule.schedule import Balance, BranchSchedule
from ringjax._tools.packing import Packing, active_blocks, draw_lengths, in_step, pack

TOKENS = 16384  # of a device
DRAWS = 20
MEDIANS = 2000, 8000, 32000
SIGMA = 1.2  # of the logarithm of the lengths
BALANCES: tuple[Balance, ...] = "stripes", "zigzag", "none"
# The most that stripes may take over the ideal, by the number of devices, for each median.
BOUNDS = {8: (1.13, 1.10, 1.08), 32: (1.28, 1.18, 1.12)}


@functools.cache
def schedule_of(num_devices: int, balance: Balance) -> BranchSchedule:
    """Returns the schedule of a dense causal ring."""
    length = TOKENS * num_devices
    make = functools.partial(make_schedule, DilatedPattern([Segments(length)]), length)
    (schedule,) = make(num_devices, 1, is_causal=True, max_block_rows=MAX_BLOCK_ROWS, balance=balance)
    return schedule


def draw(num_tokens: int, median: int, seed: int) -> Packing:
    """Returns a sequence of random documents."""
    return pack(draw_lengths(median, SIGMA, num_tokens, seed), num_tokens)[0]


def _num_blocks(schedule: BranchSchedule, packings: list[Packing]) -> int:
    return sum(np.array(active_blocks(schedule, packing)).sum() for packing in packings)


def _row(num_devices: int, name: str, packings: list[Packing]) -> dict[str, Any]:
    over_ideal = lambda balance: [in_step(schedule_of(num_devices, balance), [packing]) for packing in packings]
    stripes, zigzag, none = map(over_ideal, BALANCES)
    computed = _num_blocks(schedule_of(num_devices, "stripes"), packings)
    return {
        "case": f"{num_devices} devices, {name}",
        "stripes over the ideal": float(np.mean(stripes)),
        "worst of the draws": float(max(stripes)),
        "zigzag": float(np.mean(zigzag)),
        "contiguous": float(np.mean(none)),
        "blocks over those of contiguous": computed / _num_blocks(schedule_of(num_devices, "none"), packings),
    }


def measure() -> list[dict[str, Any]]:
    """Returns the figures of each case."""
    rows = []
    for num_devices in BOUNDS:
        length = TOKENS * num_devices
        for median in MEDIANS:
            packings = [draw(length, median, seed) for seed in range(DRAWS)]
            rows.append(_row(num_devices, f"documents of {median:,} tokens in the median", packings))
        rows.append(_row(num_devices, "one document", [Packing((0,), length)]))
    return rows


def main() -> None:
    """Runs the benchmark, and saves its figures."""
    save("balance", measure())


if __name__ == "__main__":
    main()
