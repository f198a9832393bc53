"""What training survives: ten kills, 2000 steps with a checkpoint every 20, and 200 steps in bfloat16 on a ring.

`python -m benchmarks.endurance`.
"""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import save
from benchmarks.training_runs import (
    Runs,
    checkpoint_steps,
    end,
    in_temporary_folder,
    kill_at_random,
    losses,
    num_steps,
    state,
)

KILLS, KILLED_STEPS, CHECKPOINT_EVERY = 10, 200, 10
SOAK_STEPS, SETTLED_STEP = 2000, 200
FOLLOWED_STEPS = 200


def kills(folder: Path, count: int = KILLS, steps: int = KILLED_STEPS) -> dict[str, float]:
    """Compares a run that is killed so often with one that is not."""
    runs = Runs(folder)
    options = f"--steps {steps} --checkpoint-every {CHECKPOINT_EVERY}".split()
    ended = runs.run(folder / "whole", *options)
    if ended.code:
        raise RuntimeError(ended.stderr)
    found = kill_at_random(runs, folder / "killed", steps, count, 0, *options)
    whole, killed = state(folder / "whole"), state(folder / "killed")
    same = whole.keys() == killed.keys() and all(np.array_equal(whole[name], killed[name]) for name in whole)
    resumed = [kill["resumed"] for kill in found[1:]]
    return {
        "kills": len(found),
        "kills after which the last whole checkpoint was not resumed": sum(
            kill["whole"] != step for kill, step in zip(found, resumed, strict=False)
        ),
        "most steps that a kill lost": max(kill["killed"] - kill["whole"] for kill in found),
        "parameters and optimizer's state bit-identical": float(same),
        "losses bit-identical": float(np.array_equal(losses(folder / "whole"), losses(folder / "killed"))),
    }


def soak(folder: Path) -> dict[str, float]:
    """Watches the memory of a long run, its compilations and its folder of checkpoints.

    Then the memory of one whose programs come from a cache, and of one for whose threads malloc keeps nothing besides:
    what grows there is in use.
    """
    runs = Runs(folder)
    figures = _watch(runs, folder / "compiling")
    cached = _watch(runs, folder / "cached")
    bare = _watch(runs, folder / "bare", GLIBC_TUNABLES="glibc.malloc.tcache_count=0", MALLOC_ARENA_MAX="1")
    for name in [name for name in figures if "memory" in name]:
        figures[f"{name}, nothing to compile"] = cached[name]
        figures[f"{name}, nothing to compile, without malloc's caches"] = bare[name]
    return figures


def _watch(runs: Runs, out: Path, **environment: str) -> dict[str, float]:
    options = f"--steps {SOAK_STEPS} --checkpoint-every 20 --evaluation-batches 1 --batch-size 1".split()
    log = out.with_suffix(".log")
    environment |= {"JAX_LOG_COMPILES": "1", "XLA_FLAGS": ""}  # none of the flags that spare tests compile time
    with log.open("w") as file:
        process = runs.start(out, *options, environment=environment, stderr=file)
        resident: dict[int, int] = {}
        checkpoints = 0
        while process.poll() is None:
            step = num_steps(out)
            status = Path(f"/proc/{process.pid}/status").read_text()
            if found := re.search(r"VmRSS:\s+(\d+)", status):
                resident[step] = int(found[1])
            checkpoints = max(checkpoints, len(checkpoint_steps(out)))
            time.sleep(0.1)
        ended = end(process)
    if ended.code:
        raise RuntimeError(log.read_text()[-2000:])
    settled = resident[max(step for step in resident if step <= SETTLED_STEP)]
    last = float(np.median([value for _, value in sorted(resident.items())][-5:]))
    before, _, after = log.read_text().partition(f"| 21/{SOAK_STEPS} ")
    compiled = re.compile(r"Finished XLA compilation of (\S+)")
    return {
        "steps": num_steps(out),
        "growth of resident memory after step 200, percent": 100 * (last / settled - 1),
        "resident memory at step 200, MiB": settled / 1024,
        "compilations of the training step": float(len(re.findall(r"XLA compilation of jit\(train\)", before + after))),
        "compilations after the first evaluation": float(len(compiled.findall(after))),
        "most checkpoints in the folder": float(checkpoints),
    }


def follow(folder: Path) -> dict[str, float]:
    """Compares the losses of a ring of eight in bfloat16 with those of one device, and of one with another seed."""
    runs = Runs(folder)
    options = f"--steps {FOLLOWED_STEPS} --checkpoint-every {FOLLOWED_STEPS} --dtype bfloat16".split()
    curves = {}
    for name, own in (("ring", "--mesh seq=8"), ("one", "--mesh seq=1"), ("other", "--mesh seq=1 --seed 1")):
        ended = runs.run(folder / name, *options, *own.split())
        if ended.code:
            raise RuntimeError(ended.stderr)
        curves[name] = losses(folder / name)
    apart = lambda a, b: float(np.abs(curves[a] - curves[b]).mean())
    return {
        "mean distance of losses, 8 devices and 1, nats": apart("ring", "one"),
        "mean distance of losses, two seeds, nats": apart("one", "other"),
        "largest distance of losses, 8 devices and 1, nats": float(np.abs(curves["ring"] - curves["one"]).max()),
    }


CASES = {
    "ten kills": kills,
    "2000 steps": soak,
    "200 steps in bfloat16": follow,
}


def check(name: str, figures: dict[str, float]) -> None:
    """Checks what training must survive.

    Raises:
      AssertionError: for a figure that is not what it has to be.
    """
    growth, distance = "growth of resident memory after step 200, percent", "distance of losses, 8 devices and 1, nats"
    if name == "ten kills":
        assert figures["kills after which the last whole checkpoint was not resumed"] == 0
        # Those since the last checkpoint, and those taken while another was being written.
        assert figures["most steps that a kill lost"] < 2 * CHECKPOINT_EVERY
        assert figures["parameters and optimizer's state bit-identical"] == figures["losses bit-identical"] == 1
    elif name == "2000 steps":
        assert figures["steps"] == SOAK_STEPS
        assert figures[growth] < 2
        assert figures[f"{growth}, nothing to compile, without malloc's caches"] < 1
        assert figures["compilations of the training step"] == 1
        assert figures["compilations after the first evaluation"] == 0
        assert figures["most checkpoints in the folder"] <= 3  # the two that are kept, and one that takes a place
    else:
        between_seeds = figures["mean distance of losses, two seeds, nats"]
        assert max(figures[f"mean {distance}"], figures[f"largest {distance}"]) < between_seeds


def main() -> None:
    """Runs all, checks it and writes the table."""
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        figures = in_temporary_folder(case)
        check(name, figures)
        rows += [{"run": name, "figure": figure, "value": float(value)} for figure, value in figures.items()]
    save("endurance", rows)


if __name__ == "__main__":
    main()
