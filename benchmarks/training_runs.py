"""Runs of the training example in processes of their own, small, on simulated devices, and what they leave behind."""

import csv
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).parent.parent
SMALL = "--sequence-length 256 --steps 20 --checkpoint-every 10 --batch-size 4 --width 32 --layers 1 --heads 2"
SMALL += " --ngram-bits 8 --evaluation-batches 2 --segment-lengths 256 --dilation-rates 1"


class Ended(NamedTuple):
    """How a process ended: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str


class Runs:
    """Starts runs on a text, which share what they compile.

    Args:
      folder: holds the text and the compiled programs.
      options: of all runs, before their own.
    """

    def __init__(self, folder: Path, options: str = SMALL) -> None:
        self.text, self.cache, self.options = folder / "text", folder / "cache", options.split()
        if not self.text.exists():
            self.text.mkdir()
            for path in sorted((ROOT / "ringjax").glob("_*.py")):
                (self.text / path.name).write_text(path.read_text())

    def start(
        self, out: Path, *options: str, environment: dict[str, str] | None = None, stderr: Any = subprocess.PIPE
    ) -> subprocess.Popen:
        """Starts a run; of the options the last count."""
        command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *self.options]
        return subprocess.Popen(
            [*command, "--data", str(self.text), "--out", str(out), *options],
            env=self.environment(**(environment or {})),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        """Returns the variables that a run sees."""
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self.cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **compiled, **variables}

    def run(self, out: Path, *options: str) -> Ended:
        """Runs to the end."""
        return end(self.start(out, *options))

    def start_processes(self, count: int, out: Path, *options: str) -> list[subprocess.Popen]:
        """Starts a run in several processes on this machine."""
        flags = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
        return [self.start(out, *options, *flags, "--process-index", str(index)) for index in range(count)]


def end(process: subprocess.Popen, timeout: float = 300) -> Ended:
    """Waits for the end of a process, which is killed after `timeout` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, stdout, stderr)


def end_all(processes: Sequence[subprocess.Popen], timeout: float = 300) -> list[Ended]:
    """Waits for the ends of all."""
    try:
        return [end(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_step(out: Path, step: int, *processes: subprocess.Popen, timeout: float = 300) -> None:
    """Waits until a run has taken a number of steps, or has ended."""
    deadline = time.monotonic() + timeout
    while num_steps(out) < step and all(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} within {timeout} seconds")
        time.sleep(0.005)


def num_steps(out: Path) -> int:
    """Returns the number of the last step in a run's metrics."""
    try:
        lines = (out / "metrics.csv").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(lines[-1].split(",")[0]) if len(lines) > 1 else 0


def losses(out: Path) -> np.ndarray:
    """Returns the loss of each step."""
    with (out / "metrics.csv").open(newline="") as file:
        return np.array([float(row["loss"]) for row in csv.DictReader(file)])


def checkpoint_steps(out: Path) -> list[int]:
    """Returns the steps of a run's whole checkpoints."""
    folder = out / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def state(out: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a run's last checkpoint by their names."""
    path = (out / "checkpoints" / str(checkpoint_steps(out)[-1]) / "default").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = checkpointer.metadata(path).item_metadata.tree
        whole = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        target = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole), shapes)
        arrays = checkpointer.restore(path, target)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(key): np.asarray(array) for key, array in leaves}


def kill_at_random(runs: Runs, out: Path, steps: int, kills: int, seed: int, *options: str) -> list[dict[str, int]]:
    """Runs to the end through a number of SIGKILLs at random steps; returns the steps of each kill and resumption."""
    draw = random.Random(seed)
    found = []
    for target in sorted(draw.sample(range(1, steps), kills)):
        resumed = max(checkpoint_steps(out), default=0)
        process = runs.start(out, *options, *(["--resume"] if resumed else []))
        wait_for_step(out, max(target, resumed + 1), process)
        time.sleep(draw.random() / 10)
        process.send_signal(signal.SIGKILL)
        end(process)
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with {process.returncode} before it was killed")
        found.append({"resumed": resumed, "killed": num_steps(out), "whole": max(checkpoint_steps(out), default=0)})
        if not found[-1]["whole"]:
            shutil.rmtree(out)
    ended = runs.run(out, *options, *(["--resume"] if checkpoint_steps(out) else []))
    if ended.code:
        raise RuntimeError(ended.stderr)
    return found


def in_temporary_folder(function: Callable[[Path], Any]) -> Any:
    """Returns what a function gives for a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return function(Path(folder))
