"""Runs of the training example that are forked from a process which has imported it: each would take seconds to."""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.training_runs import ROOT, Runs

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["train_lm", "matplotlib.backends.backend_agg", "forked_runs"])
OUTPUTS = "stdout", "stderr"


class ForkedRuns(Runs):
    """Runs that begin where all imports are done."""

    def start(self, out, *options):
        folders = f"{ROOT / 'examples'}:{ROOT / 'tests'}:{ROOT}"
        # Read by the parent of all runs, which the first one starts.
        with mock.patch.dict(os.environ, self.environment(PYTHONPATH=folders)):
            options = [*self.options, "--data", str(self.text), "--out", str(out), *options]
            return ForkedRun(options, Path(tempfile.mkdtemp(dir=self.text.parent)))


class ForkedRun:
    """One run, with as much of `subprocess.Popen` as the tests use; what it prints goes to files in a folder."""

    def __init__(self, options, folder):
        self.folder = folder
        self.process = SERVER.Process(target=train, args=(options, folder))
        self.process.start()
        self.kill = self.process.kill

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, timeout):
        self.process.join(timeout)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("train_lm.py", timeout)
        return self.process.exitcode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return tuple((self.folder / name).read_text() for name in OUTPUTS)


def train(options, folder):
    import train_lm  # noqa: PLC0415  # by the parent already

    for number, name in enumerate(OUTPUTS, 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["train_lm.py"]
    try:
        train_lm.main(options)
    finally:
        atexit._run_exitfuncs()  # which forked processes leave out
