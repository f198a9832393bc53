"""How well a model predicts by the position in a document: with a dilated pattern, and with its local branch alone.

`python -m benchmarks.long_context`. The text is drawn: the letters of each document have frequencies of its own, which
only the letters before tell. So it is known how well any model can predict, and context is all that helps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import save
from benchmarks.training_runs import Ended, Runs, in_temporary_folder

LETTERS, CONCENTRATION = np.arange(32, 127, dtype=np.uint8), 0.05
DOCUMENTS, LENGTH = 2000, 2046
OPTIONS = "--sequence-length 2048 --batch-size 4 --layers 2 --steps 300 --checkpoint-every 300 --evaluation-batches 50"
PATTERNS = {
    "dilated pattern": "--segment-lengths 64,512,2048 --dilation-rates 1,2,4",
    "its local branch alone": "--segment-lengths 64 --dilation-rates 1",
}
SEEDS = 2


def draw_text(folder: Path) -> None:
    """Writes the documents."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for number in range(DOCUMENTS):
        frequencies = draw.dirichlet(np.full(len(LETTERS), CONCENTRATION))
        (folder / f"{number:04}.txt").write_bytes(draw.choice(LETTERS, LENGTH, p=frequencies).tobytes())


def best_bits(folder: Path) -> np.ndarray:
    """Returns the bits of each letter of a document [LENGTH] for one who knows how frequencies are drawn.

    Having counted c of a letter among n, that is -log2 of (c + a) / (n + a * number of letters), a the concentration.
    """
    bits = []
    for path in sorted(folder.iterdir())[9::10]:  # those that training holds out
        text = np.frombuffer(path.read_bytes(), np.uint8)
        seen = np.cumsum(text[:, None] == LETTERS, axis=0) - (text[:, None] == LETTERS)  # [LENGTH, letters]
        count = seen[np.arange(LENGTH), text - LETTERS[0]]
        total = np.arange(LENGTH) + CONCENTRATION * len(LETTERS)
        bits.append(-np.log2((count + CONCENTRATION) / total))
    return np.mean(bits, axis=0)


def compare(folder: Path, train: Callable[..., Ended], patterns: dict[str, str], length: int) -> list[dict[str, Any]]:
    """Returns the rows of a table: for each range of positions up to a length the bits of models with two patterns.

    `train(out, *options)` is a run of `examples/train_lm.py`. What the first pattern gains counts beyond the spread.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in patterns}
    positions = np.zeros(0)
    for name, options in patterns.items():
        for seed in range(SEEDS):
            out = folder / f"{name} {seed}"
            ended = train(out, *options.split(), "--seed", str(seed))
            if ended.code:
                raise RuntimeError(ended.stderr)
            positions, _, bits, _ = np.loadtxt(out / "positions.csv", delimiter=",", skiprows=1, unpack=True)
            found[name].append(bits)
    first, second = found.values()
    rows: list[dict[str, Any]] = []
    for number, begin in enumerate(positions.astype(int)):
        of_first, of_second = ([float(bits[number]) for bits in curves] for curves in (first, second))
        row = {"positions": f"{begin} to {min(2 * begin, length) - 1}"}
        row |= {"bits gained": np.mean(of_second) - np.mean(of_first)}
        row |= {"spread of two seeds": max(np.ptp(of_first), np.ptp(of_second))}
        rows.append(row | dict(zip(patterns, map(np.mean, (of_first, of_second)), strict=True)))
    return [{key: value if isinstance(value, str) else float(value) for key, value in row.items()} for row in rows]


def measure(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of the table: for each range of positions the bits of both models, and the least possible."""
    text = folder / "text"
    draw_text(text)
    rows = compare(folder, Runs(folder, OPTIONS).run, PATTERNS, LENGTH + 1)  # the end of a document is scored too
    best = best_bits(text)
    for row in rows:
        begin, last = map(int, row["positions"].split(" to "))
        row["least there can be"] = float(best[begin - 1 : last].mean())
    return rows


def main() -> None:
    """Trains four models, some minutes each, and writes the table."""
    save("long_context", in_temporary_folder(measure))


if __name__ == "__main__":
    main()
