"""Pictures of the site that are drawn when it is built."""

import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import ringjax


def draw_ring(num_devices: int = 4, tokens_of_device: int = 4, is_causal: bool = True) -> Image:
    """Returns a moving picture of a ring: in each step every device meets the keys of another device."""
    length = num_devices * tokens_of_device
    figure, (pairs, ring) = plt.subplots(1, 2, figsize=(8.4, 4.2), layout="constrained", width_ratios=(1, 1))
    colors = [plt.get_cmap("tab10")(number) for number in range(num_devices)]
    angles = np.pi / 2 - 2 * np.pi * np.arange(num_devices) / num_devices
    device = np.arange(length) // tokens_of_device

    def draw(step: int) -> None:
        pairs.clear()
        ring.clear()
        # The device that owns the keys which a device meets in this step.
        owner = (np.arange(num_devices) - step) % num_devices
        hop = (device[:, None] - device) % num_devices
        image = np.where(hop < step, 1, np.where(hop == step, 2, 0))
        if is_causal:
            image = np.where(np.arange(length)[:, None] >= np.arange(length), image, 0)
        pairs.imshow(image, cmap=ListedColormap(["white", "lightgray", "tab:blue"]), vmin=0, vmax=2)
        for boundary in np.arange(1, num_devices) * tokens_of_device - 0.5:
            pairs.axhline(boundary, color="gray", linewidth=0.5)
            pairs.axvline(boundary, color="gray", linewidth=0.5)
        ticks = range(0, length, tokens_of_device)
        pairs.set(xlabel="key", ylabel="query", xticks=ticks, yticks=ticks, title=f"step {step}")
        colored = (("tab:blue", "computed now"), ("lightgray", "done"), ("white", "later or never"))
        handles = [Patch(facecolor=color, edgecolor="gray", label=name) for color, name in colored]
        pairs.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize="small")
        for number, angle in enumerate(angles):
            x, y = np.cos(angle), np.sin(angle)
            ring.text(x, y, f"device {number}\nqueries {number}", ha="center", va="center", fontsize="small")
            ring.text(
                1.7 * x,
                1.4 * y,
                f"keys {owner[number]}",
                ha="center",
                va="center",
                color="white",
                bbox={"boxstyle": "round", "color": colors[owner[number]]},
            )
            following = angles[(number + 1) % num_devices]
            tip, tail = ([np.cos(a), np.sin(a)] for a in (following + 0.45, angle - 0.45))
            ring.annotate("", tip, tail, arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.2"})
        ring.set(
            xlim=(-2.2, 2.2), ylim=(-1.8, 1.8), aspect="equal", title="then all keys and values hop to the next device"
        )
        ring.axis("off")

    animation = FuncAnimation(figure, draw, frames=num_devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ring.gif"
        animation.save(path, writer=PillowWriter(fps=0.7))
        data = path.read_bytes()
    plt.close(figure)
    return Image(data=data, format="gif", alt="Devices in a ring, and the pairs that each step computes")


def draw_rates(num_tokens: int = 32, rate: int = 4, num_heads: int = 4) -> None:
    """Draws which tokens of a segment each head keeps."""
    branch = ringjax.Segments(num_tokens // 2, rate)
    kept = np.array([branch.keeps(np.arange(num_tokens), head % rate) for head in range(num_heads)])
    _, axes = plt.subplots(figsize=(8.4, 1.8), layout="constrained")
    axes.imshow(kept, cmap=ListedColormap(["white", "tab:blue"]), aspect="auto")
    axes.axvline(num_tokens // 2 - 0.5, color="tab:red", label="a segment ends")
    axes.set(xlabel="token", ylabel="head", yticks=range(num_heads), title=f"{branch}: blue tokens are kept")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def draw_long_context() -> None:
    """Draws the bits of a model by the position in a document, with a dilated pattern and without."""
    path = Path(__file__).parent.parent / "benchmarks" / "results" / "long_context.json"
    rows = json.loads(path.read_text())["rows"]
    begins = [int(row["positions"].split()[0]) for row in rows]
    _, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    styles = {"its local branch alone": "o-", "dilated pattern": "o-", "least there can be": "k--"}
    for name, style in styles.items():
        axes.plot(begins, [row[name] for row in rows], style, label=name)
    axes.axvline(64, color="gray", linewidth=1, label="length of the local segments")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the document, from", ylabel="held-out bits for each letter")
    axes.legend(fontsize="small")
