"""What fine-tuning has changed: the held-out loss by position, and what is found in a haystack."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from parts.pretrained.generation import generate
from parts.pretrained.model import LanguageModel
from parts.pretrained.text import Rows, hide_needles
from parts.pretrained.training import Trainer

LOSSES = "held_out.json"
DEPTHS = 0.0, 0.25, 0.5, 0.75, 1.0


def add_losses(folder: Path, step: int, trainer: Trainer, params: Any, batches: Iterable[Rows]) -> float:
    """Adds the held-out losses by position at a step to the file of a run, and returns their mean."""
    found = [trainer.held_out(params, trainer.fixed, rows) for rows in batches]
    sums, counts = np.asarray(jax.device_get(found), np.float64).sum(axis=0)
    path = folder / LOSSES
    before = json.loads(path.read_text()) if step and path.exists() else {}
    of_step = {str(2**i): sums[i] / counts[i] for i in np.flatnonzero(counts)}
    path.write_text(json.dumps(before | {str(step): of_step}))
    return float(sums.sum() / counts.sum())


def plot_losses(folder: Path) -> Path:
    """Draws the held-out losses by position that a run has written, before the first step and after the last."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # which takes its time

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for step, losses in json.loads((folder / LOSSES).read_text()).items():
        axes.plot([int(position) for position in losses], [*losses.values()], "o-", label=f"step {step}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position, from", ylabel="held-out loss")
    axes.legend()
    path = folder / "held_out.png"
    figure.savefig(path, dpi=120)
    return path


def needle_table(
    model: LanguageModel, tokenizer: Tokenizer, text: np.ndarray, lengths: Sequence[int], multiple: int
) -> list[str]:
    """Returns a table that says, for each length and depth, whether the model finds the hidden number.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      text: tokens to hide the number in.
      lengths: those of the prompts with their answer, in tokens.
      multiple: over how many devices the rows of a batch are sharded.
    """
    lines = ["needle at  " + " ".join(f"{depth:>5.0%}" for depth in DEPTHS)]
    for length in lengths:
        is_found = []
        for needle in hide_needles(tokenizer, text, length, DEPTHS):
            tokens = generate(model, [needle.prompt] * multiple, len(needle.answer))
            is_found.append([int(token[0]) for token in tokens] == needle.answer)
        lines.append(f"{length:>9}  " + " ".join(f"{'found' if one else '-':>5}" for one in is_found))
        jax.clear_caches()  # of a program for each length
    return lines
