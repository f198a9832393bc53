"""The metrics of a run: a line of CSV for each step and for each range of positions, and their plot."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

POSITIONS = "positions.csv"
OF_POSITIONS = ("position", "bytes", "held_out_bits_per_byte", "step")
COLUMNS = ("step", "loss", "bits_per_byte", "tokens_per_second", "held_out_bits_per_byte")

Row = dict[str, float]


class Metrics:
    """The lines of a file, to which each step adds one: in memory they would grow with the run.

    A run that was killed may have left lines of steps after its checkpoint, the last of them cut: these go. So does the
    file of positions beside it, if it is of another step. With a folder for TensorBoard it gets the same figures.
    """

    def __init__(self, path: Path, steps: int, tensorboard: Path | None = None) -> None:
        self.path, self.writer = path, None
        if tensorboard is not None:
            from tensorboardX import SummaryWriter  # noqa: PLC0415  # which takes its time

            self.writer = SummaryWriter(str(tensorboard), purge_step=steps + 1)
        rows = [row for row in self.read() if row["step"] <= steps] if steps else []
        _write(path, COLUMNS, rows)
        positions = path.with_name(POSITIONS)
        if positions.exists() and any(row["step"] != steps for row in read_positions(path.parent)):
            positions.unlink()

    def add(self, row: Row, scores: np.ndarray | None = None) -> None:
        """Adds the line of a step; the scores, if any, are the held-out bits and the bytes by position [2, n]."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)  # pyright: ignore[reportArgumentType]
        if self.writer is not None:
            for name, value in row.items():
                if name != "step" and not math.isnan(value):
                    self.writer.add_scalar(name, value, int(row["step"]))
            self.writer.flush()
        if scores is not None:
            # Entry i of [n] holds the positions from 2**i on.
            rows: list[Row] = []
            for i in np.flatnonzero(scores[1]):
                bits, count = map(float, scores[:, i])
                values = 2 ** int(i), int(count), bits / count, row["step"]
                rows.append(dict(zip(OF_POSITIONS, values, strict=True)))
            _write(self.path.with_name(POSITIONS), OF_POSITIONS, rows)

    def read(self) -> list[Row]:
        """Returns the whole lines, those of a run that this one continues among them."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
        return [row | {"step": int(row["step"])} for row in rows]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes a file that is whole whenever it is read."""
    whole = path.with_suffix(".new")
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)  # pyright: ignore[reportArgumentType]
    whole.replace(path)


def read_positions(folder: Path) -> list[Row]:
    """Returns the held-out bits per byte of a run by the position in the document.

    Each row holds the positions from its own up to that of the next; a document's first byte is at position 1.

    Raises:
      ValueError: if the folder is not that of a run which has got to an evaluation.
    """
    path = folder / POSITIONS
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if not rows or set(rows[0]) != set(OF_POSITIONS):
        raise ValueError(f"{folder} has no {POSITIONS} of a run: give the --out of one that has got to an evaluation")
    return [{name: float(value) for name, value in row.items()} for row in rows]


def plot(path: Path, rows: list[Row], yardsticks: Mapping[str, float], positions: Mapping[str, list[Row]]) -> None:
    """Draws the loss curve beside the held-out bits per byte of others, and those of runs by position."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # which takes its time

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes, by_position = figure.subplots(ncols=2)
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["bits_per_byte"] for row in rows], label="training", linewidth=1)
    held_out = [(row["step"], row["held_out_bits_per_byte"]) for row in rows]
    axes.plot(*zip(*[point for point in held_out if not math.isnan(point[1])], strict=True), "o-", label="held out")
    for (name, bits), style in zip(yardsticks.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    for run, rows_of_run in positions.items():
        # Of a few bytes the bits say nothing, and would flatten the rest of the picture.
        most = max((row["bytes"] for row in rows_of_run), default=0)
        rows_of_run = [row for row in rows_of_run if row["bytes"] >= most / 1000]  # noqa: PLW2901
        places = [row["position"] for row in rows_of_run]
        by_position.plot(places, [row["held_out_bits_per_byte"] for row in rows_of_run], "o-", label=run)
    by_position.set_xscale("log", base=2)
    by_position.set(xlabel="position in the document, from", ylabel="held-out bits per byte")
    by_position.legend()
    figure.savefig(path, dpi=120)
