"""Runs the benchmarks, each in a process of its own, and writes one page of their tables and plots.

`python -m benchmarks`; the machine should do nothing else.
"""

import json
import subprocess
import sys
import textwrap

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.timing import RESULTS, table

CLAIMS = {
    "local_speed": "One device runs attention near the rate at which it multiplies matrices",
    "ring_speed": "A ring of eight runs near the rate of one device, ahead of its peers",
    "row_costs": "Selecting rows and merging branches costs little, and short segments keep up with a batched einsum",
    "features": "Documents cost what their pairs cost, a union less than its branches",
    "balance": "Packed documents keep all devices of a ring busy in each step, to a few percent",
    "decoding": "A token over a sharded cache takes what a plain softmax takes, and little where it sees few keys",
    "scaling": "Programs for 32 devices are as large as those for 8 where both have the same rings, and add no error",
    "plan_accuracy": "The planner sends what the compiler does, and puts strategies in the order of the clock",
    "random_search": "Random calls give what the oracle gives",
    "clients": "Models of Tunix and MaxText give their own numbers over a ring",
    "compile_time": "A gradient is traced and compiled in seconds",
    "long_context": "Where context is all there is to learn, a dilated pattern learns from more of it",
    "source_code": "On source code a small model learns nothing from more context: the gap is that of two seeds",
    "endurance": "Training survives kills, long runs, and rings in bfloat16",
    "slide_encoder": "The slide encoder takes half the time of dense attention in torch, little more on eight devices",
    "kernels": "On TPUs the matrix units are in use for most of a kernel's bundles",
    "gpu_kernels": "On Hopper GPUs a kernel's instructions may hide behind its products, and none spills",
    "deviceless": "cuDNN has an engine for all that it is asked for",
    "ahead_of_time": "On H100s and TPUs the ring sends the fewest bytes and hides all of them behind computation",
}
MOST_LETTERS = 80  # of a line of a name, beside which there is room for bars
HOURS = ("random_search",)  # what is run by its own command alone
# What `benchmarks/on_gpu.py` and `benchmarks/gpu_profile.py` measure, where there is a GPU.
ON_GPU = (
    "errors",
    "errors_in_pallas",
    "one_branch",
    "packed_documents",
    "chained_tiles",
    "windows",
    "longnet",
    "share_of_selection",
    "emulated_ring",
    "in_pallas",
    "longest",
    "profile",
)


def plot(name: str, rows: list[dict]) -> None:
    """Draws the first number of each row as a bar, named by the texts before it."""
    texts = [", ".join(value for value in row.values() if isinstance(value, str)) for row in rows]
    names = [textwrap.fill(text, MOST_LETTERS) for text in texts]
    values = [next(value for value in row.values() if isinstance(value, float)) for row in rows]
    label = next(key for key, value in rows[0].items() if isinstance(value, float))
    lines = sum(name.count("\n") + 1 for name in names)
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.35 * len(rows) + 0.2 * (lines - len(rows))), layout="constrained")
    axes.barh(names[::-1], values[::-1])
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xlabel(label)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def page_of_results() -> str:
    """Returns the page of the results that are there."""
    page = ["# Benchmarks", "", "Written by `python -m benchmarks`: two CPU cores, float32; ratios only.", ""]
    for name, claim in CLAIMS.items():
        result = json.loads((RESULTS / f"{name}.json").read_text())
        versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
        page += [f"## {claim}", "", f"![{claim}]({name}.svg)", ""]
        page += [*table(result["rows"], markdown=True), ""]
        machine = f", {result['processor']}" if "processor" in result else ""
        page += [f"`python -m benchmarks.{name}`, {versions}, {result['backend']}{machine}", ""]
    return "\n".join([*page, *_on_gpu()])


def _on_gpu() -> list[str]:
    """Returns the lines of what was measured on a GPU."""
    page = ["## On one GPU", "", "By `python benchmarks/on_gpu.py` and `python benchmarks/gpu_profile.py`.", ""]
    for path in (RESULTS / f"gpu_{name}.json" for name in ON_GPU):
        result = json.loads(path.read_text())
        versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
        page += [f"### {result['claim']}", "", *table(result["rows"], markdown=True), ""]
        page += [", ".join(filter(None, [result["device"], versions, result["date"], result.get("note")])), ""]
    return page


def write_page() -> None:
    """Draws the results that are there, and writes their page."""
    mpl.rcParams["svg.hashsalt"] = "ringjax"  # the same results give the same files
    for name in CLAIMS:
        plot(name, json.loads((RESULTS / f"{name}.json").read_text())["rows"])
    (RESULTS / "README.md").write_text(page_of_results())


def main() -> None:
    """Runs everything, then writes the page."""
    for name in (name for name in CLAIMS if name not in HOURS):
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    write_page()


if __name__ == "__main__":
    main()
