"""How well a model predicts source code by the position in a file: with a dilated pattern, and its local branch alone.

`python -m benchmarks.source_code`; half an hour. Text and options are the defaults of `examples/train_lm.py`.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.long_context import compare
from benchmarks.timing import save
from benchmarks.training_runs import ROOT, Ended, in_temporary_folder

LENGTH = 8192 + 1  # the end of a document is scored too
PATTERNS = {"dilated pattern": "", "its local branch alone": "--segment-lengths 256 --dilation-rates 1"}


def train(out: Path, *options: str) -> Ended:
    """Runs the example to its end."""
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def main() -> None:
    """Trains four models, some minutes each, and writes the table."""
    save("source_code", in_temporary_folder(lambda folder: compare(folder, train, PATTERNS, LENGTH)))


if __name__ == "__main__":
    main()
