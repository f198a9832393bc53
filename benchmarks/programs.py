"""Reads a compiled program: which permutes overlap with computation, its gathers and its arrays."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringjax._tools.hlo import arrays_in, computations, groups_of, pairs_of


def loop_permutes(text: str) -> list[bool]:
    """Returns for each permute inside a loop of a scheduled program whether blocks are computed between start and end.

    Blocks are computed by loops, or by kernels, which stand in a conditional where the case of a step is data. What
    is small is hidden by sums as well, of arrays so much larger that memory takes longer for them than links for it.
    """
    lines_of = computations(text)
    return [is_hidden for body in _bodies(text) for is_hidden in _hidden(lines_of[body])]


def loop_lines(text: str) -> list[str]:
    """Returns the lines of all loops' bodies."""
    lines_of = computations(text)
    return [line for body in _bodies(text) for line in lines_of[body]]


def _bodies(text: str) -> set[str]:
    return set(re.findall(r"body=%?([\w.\-]+)", text))


def entry_permutes(text: str) -> list[bool]:
    """Returns the same for each permute of a scheduled program that no loop contains."""
    return _hidden(computations(text)["ENTRY"])


def crossing_permutes(text: str, size: int) -> list[bool]:
    """Returns the same for each permute, in loops or not, that sends everything to the next group of `size` devices."""
    groups = lambda line: {(there // size - here // size, there % size - here % size) for here, there in pairs_of(line)}
    crosses = lambda line: all(across and not around for across, around in groups(line))
    lines_of = computations(text)
    return [one for name in (*sorted(_bodies(text)), "ENTRY") for one in _hidden(lines_of[name], crosses)]


def _hidden(lines: list[str], is_one: Callable[[str], bool] = lambda line: True) -> list[bool]:
    computes = re.compile(r" (while|conditional)\(|__cudnn|tpu_custom_call|mosaic_gpu")
    found = []
    for index, line in enumerate(lines):
        if not (re.search(r" collective-permute(-start)?\(", line) and is_one(line)):
            continue
        if re.search(r" collective-permute\(", line):  # synchronous: nothing runs meanwhile
            found.append(False)
        name = re.search(r"%?([\w.\-]+) = .*collective-permute-start\(", line)
        if name:
            end = next(i for i, other in enumerate(lines) if re.search(rf"-done\(%?{re.escape(name[1])}\)", other))
            most = max((max(array_sizes(other)) for other in lines[index:end] if " fusion(" in other), default=0)
            found.append(any(map(computes.search, lines[index:end])) or most >= 64 * max(array_sizes(line)))
    return found


class Gather(NamedTuple):
    """A collective: the devices that talk, in groups [count, size], and the operation that asked for it."""

    groups: np.ndarray
    name: str


def gathers(text: str, collective: str = "all-gather") -> list[Gather]:
    """Returns the all-gathers of a compiled program, or its collectives of another kind."""
    lines = [line for line in text.splitlines() if re.search(rf" {collective}(-start)?\(", line)]
    names = [re.search(r'op_name="([^"]*)"', line) for line in lines]
    return [Gather(groups_of(line), name[1] if name else "") for line, name in zip(lines, names, strict=True)]


def has_dimension(text: str, size: int) -> bool:
    """Returns whether any array of a program has a dimension of this size."""
    return any(size in shape for _, shape in arrays_in(text))


def array_sizes(text: str) -> list[int]:
    """Returns the number of elements of each array that a piece of a program names."""
    return [math.prod(shape) for _, shape in arrays_in(text)]
