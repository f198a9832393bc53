"""Draws the picture of the README: a dilated pattern, and the ring that computes its longest branch.

`python examples/draw_pattern.py docs/pattern.svg`
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch

from ringjax import DilatedPattern

LENGTH, DEVICES = 32, 4
LENGTHS, RATES = (8, 16, 32), (1, 2, 4)
PATTERN = DilatedPattern.of_lengths(LENGTHS, RATES)
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")


def draw_multiplicity(axes: Axes, head: int) -> None:
    """Draws how many branches hold each pair of tokens, for one head."""
    count = PATTERN.multiplicity(LENGTH, num_kv_heads=4, is_causal=True)[head]
    colors = mpl.colormaps["viridis_r"]
    axes.imshow(np.ma.masked_equal(count, 0), cmap=colors, vmin=0, vmax=3)
    for boundary in range(LENGTH // DEVICES, LENGTH, LENGTH // DEVICES):
        axes.axhline(boundary - 0.5, color="gray", linewidth=0.5)
        axes.axvline(boundary - 0.5, color="gray", linewidth=0.5)
    handles = [Patch(color=colors(n / 3), label=f"in {n} {'branch' if n == 1 else 'branches'}") for n in (1, 2, 3)]
    handles.append(Patch(facecolor="white", edgecolor="gray", label="do not attend"))
    axes.legend(handles=handles, loc="upper right", fontsize="small")  # no causal pair is there
    axes.set(title=f"pairs of head {head}, causal", xlabel="key", ylabel="query", xticks=(), yticks=())


def draw_ring(axes: Axes) -> None:
    """Draws the devices, the tokens that they hold, and the kept rows that travel between them."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(DEVICES) / DEVICES
    centers = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    share = LENGTH // DEVICES
    for device, (x, y) in enumerate(centers):
        tokens = np.arange(share)
        kept = (device * share + tokens) % 4 == 0
        left = x + (tokens - share / 2) * 0.085
        axes.bar(left, 0.2, 0.075, bottom=y - 0.1, color=np.where(kept, COLORS[device], "#dddddd"), align="edge")
        axes.text(x, y + 0.15, f"device {device}: tokens {device * share}..{(device + 1) * share - 1}", ha="center")
        target = centers[(device + 1) % DEVICES]
        arrow = FancyArrowPatch(
            (x, y), tuple(target), shrinkA=42, shrinkB=42, arrowstyle="->", mutation_scale=14, color=COLORS[device]
        )
        axes.add_patch(arrow)
    axes.text(0, -0.1, "only the kept\nrows of keys\nand values\ntravel", ha="center", va="center", fontsize="small")
    axes.set(title="the ring of branch (32, 4)", xlim=(-1.8, 1.8), ylim=(-1.4, 1.4), aspect="equal")
    axes.axis("off")


def main(path: Path) -> None:
    """Writes the picture."""
    mpl.rcParams["svg.hashsalt"] = "ringjax"  # the same picture gives the same file
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.7), layout="constrained", width_ratios=(1, 1, 1.3))
    draw_multiplicity(axes[0], head=0)
    draw_multiplicity(axes[1], head=1)
    draw_ring(axes[2])
    figure.suptitle(f"segments of {LENGTHS} tokens, rates {RATES}, on 4 devices")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="the picture to write, such as pattern.svg")
    main(parser.parse_args().path)
