"""Reads a compiled program: its collectives with the trip counts of their loops, and the bytes that they send."""

import math
import re
from typing import NamedTuple

import numpy as np

WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}


class Permute(NamedTuple):
    """A permute that runs `trips` times and sends `bytes` to a neighbor each time."""

    trips: int
    bytes: int
    pairs: tuple[tuple[int, int], ...]


def permutes(text: str) -> list[Permute]:
    """Returns the permutes of a compiled program."""
    found = []
    for line, trips in _run_lines(text, "collective-permute"):
        found.append(Permute(trips, _result_bytes(line, "collective-permute"), pairs_of(line)))
    return found


def pairs_of(line: str) -> tuple[tuple[int, int], ...]:
    """Returns the sources and destinations of the permute of a line."""
    _, _, rest = line.partition("source_target_pairs={")
    pairs = re.findall(r"\{(\d+),(\d+)\}", rest.partition("}}")[0] + "}")
    return tuple((int(source), int(destination)) for source, destination in pairs)


def bytes_sent(text: str) -> dict[str, int]:
    """Returns the bytes that a device sends to others in a compiled program, by kind of collective."""
    # The share of a result's bytes that each of the n devices of a group sends.
    shares = {
        "all-to-all": lambda n: (n - 1) / n,
        "all-gather": lambda n: (n - 1) / n,
        "reduce-scatter": lambda n: n - 1,
    }
    sent = {"collective-permute": sum(permute.trips * permute.bytes for permute in permutes(text))}
    for kind, share in shares.items():
        lines = _run_lines(text, kind)
        sent[kind] = round(sum(n * _result_bytes(line, kind) * share(groups_of(line).shape[1]) for line, n in lines))
    return {kind: number for kind, number in sent.items() if number}


def _run_lines(text: str, collective: str) -> list[tuple[str, int]]:
    """Returns the lines of a kind of collective, each with how often it runs."""
    bodies = computations(text)
    found = []

    def walk(name: str, count: int) -> None:
        for line in bodies[name]:
            if re.search(rf" {collective}(-start)?\(", line):
                found.append((line, count))
            trips = _trips(line, bodies)
            for kind, callee in re.findall(r"(body|to_apply|calls)=%?([\w.\-]+)", line):
                walk(callee, count * trips if kind == "body" else count)
            for branches in re.findall(r"branch_computations=\{(.*?)\}", line):
                for callee in branches.split(","):
                    walk(callee.strip().lstrip("%"), count)
            for callee in re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line):
                walk(callee, count)

    walk("ENTRY", 1)
    return found


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Returns the trip count of a loop: the compiler's, or else the bound in its condition; 1 for other lines."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    condition = re.search(r" while\(.*condition=%?([\w.\-]+)", line)
    lines = bodies[condition[1]] if condition else []
    bounds = [re.search(r" constant\((\d+)\)", line) for line in lines]
    found = [int(bound[1]) for bound in bounds if bound]
    return found[0] if len(found) == 1 and "direction=LT" in "".join(lines) else 1


def _result_bytes(line: str, collective: str) -> int:
    _, _, result = line.partition(" = ")
    arrays = arrays_in(result.partition(f" {collective}")[0])
    if f" {collective}-start(" not in line:  # the names of synchronous ones may contain "-start" too
        return sum(map(_bytes, arrays))
    # The result of a start repeats its operands; on TPUs it also has u32 words of its own.
    arrays = [array for array in arrays if array != ("u32", ())]
    return sum(map(_bytes, arrays[len(arrays) // 2 :]))


def groups_of(line: str) -> np.ndarray:
    """Returns the groups [count, size] of devices that communicate in the collective of a line."""
    numbers = lambda text: [int(number) for number in re.findall(r"\d+", text)]
    _, _, rest = line.partition("replica_groups=")
    if rest.startswith("{"):
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", rest.partition("}}")[0] + "}")])
    if rest.startswith("mesh"):  # some axes of a mesh, which may list its devices in any order
        mesh, devices, axes = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", rest).groups()  # pyright: ignore
        sizes = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", mesh)}
        array = _listed(devices or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
        chosen = [list(sizes).index(name) for name in re.findall(r"'([\w.]+)'", axes)]
        size = math.prod(array.shape[axis] for axis in chosen)
        return np.moveaxis(array, chosen, range(-len(chosen), 0)).reshape(-1, size)
    shape, devices = re.match(r"\[(.*?)\]<=(\[.*?\](?:T\(.*?\))?)", rest).groups()  # pyright: ignore
    return _listed(devices).reshape(numbers(shape))


def _listed(text: str) -> np.ndarray:
    """Returns the devices of an iota list such as [2,4]T(1,0): 0 to 7 in that shape, transposed."""
    shape, _, order = text.partition("T")
    numbers = [[int(number) for number in re.findall(r"\d+", part)] for part in (shape, order)]
    array = np.arange(math.prod(numbers[0])).reshape(numbers[0])
    return array.transpose(numbers[1] or range(array.ndim))


def computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation of a program, by its name."""
    found, lines = {}, []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            lines = found["ENTRY" if header.group(1) else header.group(2)] = []
        else:
            lines.append(line)
    return found


def arrays_in(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the dtype and the shape of each array that a piece of a program names."""
    found = re.findall(r"\b(" + "|".join(WIDTHS) + r")\[([\d,]*)\]", text)
    return [(dtype, tuple(map(int, shape.split(","))) if shape else ()) for dtype, shape in found]


def _bytes(array: tuple[str, tuple[int, ...]]) -> int:
    return WIDTHS[array[0]] * math.prod(array[1])
