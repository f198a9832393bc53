"""Reads a compiled program: its permutes with the trip counts of their loops, its arrays, its memory."""

import math
import re
from typing import NamedTuple

import numpy as np

WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}


class Permute(NamedTuple):
    """A permute that runs `trips` times and sends `bytes` to a neighbour each time."""

    trips: int
    bytes: int
    pairs: tuple[tuple[int, int], ...]


def permutes(text: str) -> list[Permute]:
    """Returns the permutes of a compiled program."""
    found = []
    for line, trips in _run_lines(text, "collective-permute"):
        _, _, rest = line.partition("source_target_pairs={")
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest.partition("}}")[0] + "}")
        pairs = tuple((int(source), int(destination)) for source, destination in pairs)
        found.append(Permute(trips, _result_bytes(line, "collective-permute"), pairs))
    return found


def bytes_sent(text: str) -> dict[str, int]:
    """Returns the bytes that a device of a compiled program sends to others, by kinds of collectives."""
    # Of the bytes of a result, which all devices of a group have.
    shares = {
        "all-to-all": lambda n: (n - 1) / n,
        "all-gather": lambda n: (n - 1) / n,
        "reduce-scatter": lambda n: n - 1,
    }
    sent = {"collective-permute": sum(permute.trips * permute.bytes for permute in permutes(text))}
    for kind, share in shares.items():
        lines = _run_lines(text, kind)
        sent[kind] = round(sum(n * _result_bytes(line, kind) * share(_groups(line).shape[1]) for line, n in lines))
    return {kind: number for kind, number in sent.items() if number}


def _run_lines(text: str, collective: str) -> list[tuple[str, int]]:
    """Returns the lines of a kind of collective, each with how often it runs."""
    computations = _computations(text)
    found = []

    def walk(name: str, count: int) -> None:
        for line in computations[name]:
            if re.search(rf" {collective}(-start)?\(", line):
                found.append((line, count))
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for kind, callee in re.findall(r"(body|to_apply|calls)=%?([\w.\-]+)", line):
                walk(callee, count * int(trips.group(1)) if kind == "body" and trips else count)
            for branches in re.findall(r"branch_computations=\{(.*?)\}", line):
                for callee in branches.split(","):
                    walk(callee.strip().lstrip("%"), count)
            for callee in re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line):
                walk(callee, count)

    walk("ENTRY", 1)
    return found


def _result_bytes(line: str, collective: str) -> int:
    _, _, result = line.partition(" = ")
    arrays = _arrays(result.partition(f" {collective}")[0])
    if "-start" not in line:
        return sum(map(_bytes, arrays))
    if collective == "collective-permute":  # a start's result repeats its operands, as large as what arrives
        return sum(map(_bytes, arrays)) // 2
    return sum(map(_bytes, arrays[len(arrays) // 2 :]))


def loop_permutes(text: str) -> list[bool]:
    """Returns for each permute inside a loop of a scheduled program whether blocks are computed between start and end.

    Blocks are computed by loops, or by kernels, which stand in a conditional where the case of a meeting is data.
    """
    computations = _computations(text)
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    return [is_hidden for body in bodies for is_hidden in _hidden(computations[body])]


def entry_permutes(text: str) -> list[bool]:
    """Returns the same for each permute of a scheduled program that no loop contains."""
    return _hidden(_computations(text)["ENTRY"])


def _hidden(lines: list[str]) -> list[bool]:
    computes = re.compile(r" (while|conditional)\(|__cudnn")
    found = []
    for index, line in enumerate(lines):
        if re.search(r" collective-permute\(", line):  # synchronous: nothing runs meanwhile
            found.append(False)
        name = re.search(r"%?([\w.\-]+) = .*collective-permute-start\(", line)
        if name:
            end = next(i for i, other in enumerate(lines) if re.search(rf"-done\(%?{re.escape(name[1])}\)", other))
            found.append(any(map(computes.search, lines[index:end])))
    return found


class Gather(NamedTuple):
    """A collective: the devices that talk, in groups [count, size], and the operation that asked for it."""

    groups: np.ndarray
    name: str


def gathers(text: str, collective: str = "all-gather") -> list[Gather]:
    """Returns the all-gathers of a compiled program, or its collectives of another kind."""
    lines = [line for line in text.splitlines() if re.search(rf" {collective}(-start)?\(", line)]
    names = [re.search(r'op_name="([^"]*)"', line) for line in lines]
    return [Gather(_groups(line), name[1] if name else "") for line, name in zip(lines, names, strict=True)]


def _groups(line: str) -> np.ndarray:
    numbers = lambda text: [int(number) for number in re.findall(r"\d+", text)]
    _, _, rest = line.partition("replica_groups=")
    if rest.startswith("{"):
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", rest.partition("}}")[0] + "}")])
    if rest.startswith("mesh"):  # of the axes of a mesh, which lists the devices in an order of its own, some
        mesh, devices, axes = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", rest).groups()  # pyright: ignore
        sizes = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", mesh)}
        array = _listed(devices or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
        chosen = [list(sizes).index(name) for name in re.findall(r"'([\w.]+)'", axes)]
        size = math.prod(array.shape[axis] for axis in chosen)
        return np.moveaxis(array, chosen, range(-len(chosen), 0)).reshape(-1, size)
    shape, devices = re.match(r"\[(.*?)\]<=(\[.*?\](?:T\(.*?\))?)", rest).groups()  # pyright: ignore
    return _listed(devices).reshape(numbers(shape))


def _listed(text: str) -> np.ndarray:
    """Returns the devices of a list such as [2,4]T(1,0): the numbers of a box, its sides in another order."""
    shape, _, order = text.partition("T")
    numbers = [[int(number) for number in re.findall(r"\d+", part)] for part in (shape, order)]
    array = np.arange(math.prod(numbers[0])).reshape(numbers[0])
    return array.transpose(numbers[1] or range(array.ndim))


def has_dimension(text: str, size: int) -> bool:
    """Returns whether any array of a program has a dimension of this size."""
    return any(size in shape for _, shape in _arrays(text))


def array_sizes(text: str) -> list[int]:
    """Returns the number of elements of each array that a piece of a program names."""
    return [math.prod(shape) for _, shape in _arrays(text)]


def _computations(text: str) -> dict[str, list[str]]:
    computations, lines = {}, []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            lines = computations["ENTRY" if header.group(1) else header.group(2)] = []
        else:
            lines.append(line)
    return computations


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    found = re.findall(r"\b(" + "|".join(WIDTHS) + r")\[([\d,]*)\]", text)
    return [(dtype, tuple(map(int, shape.split(","))) if shape else ()) for dtype, shape in found]


def _bytes(array: tuple[str, tuple[int, ...]]) -> int:
    return WIDTHS[array[0]] * math.prod(array[1])
