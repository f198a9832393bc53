"""The metrics of a run: a line of CSV for each step and for each range of positions, and their plot."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import numpy as np
from matplotlib import pyplot as plt

POSITIONS = "positions.csv"
COLUMNS = ("step", "loss", "bits_per_byte", "tokens_per_second", "held_out_bits_per_byte")

Row = dict[str, float]


class Metrics:
    """The lines of a file, to which each step adds one: in memory they would grow with the run.

    A run that was killed may have left lines of steps after its checkpoint, the last of them cut: these go. With a
    folder for TensorBoard it gets the same figures.
    """

    def __init__(self, path: Path, steps: int, tensorboard: Path | None = None) -> None:
        self.path, self.writer = path, None
        if tensorboard is not None:
            from tensorboardX import SummaryWriter  # noqa: PLC0415  # which takes its time

            self.writer = SummaryWriter(str(tensorboard), purge_step=steps + 1)
        rows = [row for row in self.read() if row["step"] <= steps] if steps else []
        whole = path.with_suffix(".new")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)  # pyright: ignore[reportArgumentType]
        whole.replace(path)

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
            _write_positions(self.path.parent, *scores)

    def read(self) -> list[Row]:
        """Returns the whole lines, those of a run that this one continues among them."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
        return [row | {"step": int(row["step"])} for row in rows]


def _write_positions(folder: Path, bits: np.ndarray, count: np.ndarray) -> None:
    with (folder / POSITIONS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("position", "bytes", "held_out_bits_per_byte"))
        # Entry i of [n] holds the positions from 2**i on.
        writer.writerows((2**i, int(count[i]), bits[i] / count[i]) for i in np.flatnonzero(count))


def read_positions(folder: Path) -> list[Row]:
    """Returns the held-out bits per byte of a run by the position in the document, each row up to that of the next.

    Raises:
      ValueError: if the folder is not that of a run which has got to an evaluation.
    """
    if not (folder / POSITIONS).exists():
        raise ValueError(f"{folder} has no {POSITIONS}: give the --out of a run that has ended")
    with (folder / POSITIONS).open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def plot(path: Path, rows: list[Row], yardsticks: Mapping[str, float], positions: Mapping[str, list[Row]]) -> None:
    """Draws the loss curve beside the held-out bits per byte of others, and those of runs by position."""
    figure, (axes, by_position) = plt.subplots(ncols=2, figsize=(11, 4), layout="constrained")
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["bits_per_byte"] for row in rows], label="training", linewidth=1)
    held_out = [(row["step"], row["held_out_bits_per_byte"]) for row in rows]
    axes.plot(*zip(*[point for point in held_out if not math.isnan(point[1])], strict=True), "o-", label="held out")
    for (name, bits), style in zip(yardsticks.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    for run, rows_of_run in positions.items():
        places = [row["position"] for row in rows_of_run]
        by_position.plot(places, [row["held_out_bits_per_byte"] for row in rows_of_run], "o-", label=run)
    by_position.set_xscale("log", base=2)
    by_position.set(xlabel="position in the document, from", ylabel="held-out bits per byte")
    by_position.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
