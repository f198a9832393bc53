"""The metrics of a run: a line of CSV for each step, and their plot."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

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

    def add(self, row: Row) -> None:
        """Adds the line of a step."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)  # pyright: ignore[reportArgumentType]
        if self.writer is not None:
            for name, value in row.items():
                if name != "step" and not math.isnan(value):
                    self.writer.add_scalar(name, value, int(row["step"]))
            self.writer.flush()

    def read(self) -> list[Row]:
        """Returns the whole lines, those of a run that this one continues among them."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
        return [row | {"step": int(row["step"])} for row in rows]


def plot(path: Path, rows: list[Row], yardsticks: Mapping[str, float]) -> None:
    """Draws the loss curve beside the held-out bits per byte of others."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["bits_per_byte"] for row in rows], label="training", linewidth=1)
    held_out = [(row["step"], row["held_out_bits_per_byte"]) for row in rows]
    axes.plot(*zip(*[point for point in held_out if not math.isnan(point[1])], strict=True), "o-", label="held out")
    for (name, bits), style in zip(yardsticks.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
