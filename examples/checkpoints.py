"""The checkpoints of a run: whole or not there at all, and of the run's own configuration."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp


class RunError(Exception):
    """What ends a run that had begun, and what to do."""


class Checkpoints:
    """The last checkpoints of a run, each with the configuration that it was made with.

    Orbax writes a checkpoint into a folder of its own and names it last: one that was cut off is never taken for whole.

    Raises:
      ValueError: if there are checkpoints and the run is not to be resumed, or none and it is; if the one to resume is
        of another configuration, or is none of this program's.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any], resume: int | None, keep: int = 2) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's threads print in full what is reported here
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.configuration = configuration
        self.step = self._find(resume)
        if self.step:
            self._check_configuration(self.step)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(*[Exception] if error else []):  # the first error is the one to report
            self.manager.close()

    def _find(self, resume: int | None) -> int:
        steps, folder = sorted(self.manager.all_steps()), self.manager.directory
        if resume is None:
            if steps:
                raise ValueError(f"{folder} holds a run: continue it with --resume, or choose another --out")
            return 0
        if not steps:
            raise ValueError(f"there is no checkpoint in {folder}: train first, or correct --out")
        if resume and resume not in steps:
            raise ValueError(f"--resume {resume}: the checkpoints in {folder} are of steps {steps}: name one of these")
        return resume or steps[-1]

    def _check_configuration(self, step: int) -> None:
        try:
            restored = self.manager.restore(step, args=ocp.args.Composite(configuration=ocp.args.JsonRestore()))
            found = dict(restored["configuration"])
        except Exception as error:
            raise self._unreadable(step, error) from error
        own = self.configuration
        names = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
        if names:
            differences = ", ".join(f"{name} {found.get(name)} there and {own.get(name)} here" for name in names)
            raise ValueError(
                f"checkpoint {step} in {self.manager.directory} is of another configuration ({differences}): give the "
                "same, or choose another --out"
            )

    def restore(self, abstract: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays of the checkpoint to resume, laid out as the abstract ones say, and removes later ones."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            with _one_error():
                restored = self.manager.restore(self.step, args=args)
        except Exception as error:
            raise self._unreadable(self.step, error) from error
        for step in self.manager.all_steps():
            if step > self.step:
                self.manager.delete(step)
        return restored["state"]

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint while the run goes on.

        Raises:
          RunError: if this one or the one before it could not be written.
        """
        items = {"state": ocp.args.StandardSave(state), "configuration": ocp.args.JsonSave(self.configuration)}
        self._write(lambda: self.manager.save(step, args=ocp.args.Composite(**items)))

    def wait(self) -> None:
        """Waits until all are written.

        Raises:
          RunError: if one could not be.
        """
        self._write(self.manager.wait_until_finished)

    def _write(self, function: Any) -> None:
        try:
            function()
            self.manager.check_for_errors()
        except Exception as error:
            raise RunError(self.lost(f"a checkpoint could not be written: {_first_line(error)}")) from error

    def lost(self, reason: str) -> str:
        """Says what is lost and how to go on."""
        self.manager.reload()
        steps = self.manager.all_steps()
        rest = f"the last whole checkpoint is of step {max(steps)}: go on with --resume" if steps else "start again"
        return f"{reason}; {rest} when the cause is gone, such as a full disk in {self.manager.directory}"

    def _unreadable(self, step: int, error: Exception) -> ValueError:
        earlier = [other for other in self.manager.all_steps() if other < step]
        remedy = f"go on from the one before it with --resume {max(earlier)}" if earlier else "start again elsewhere"
        return ValueError(
            f"checkpoint {step} in {self.manager.directory} is damaged, or not this program's ({_first_line(error)}): "
            + remedy
        )


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Keeps quiet the readers of the other arrays, of which each prints an error when one has failed."""
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda late: None if "loop is closed" in str(late.exc_value) else hook(late)
    yield  # after an error they may be heard later: the program is about to end
    logger.setLevel(level)
    sys.unraisablehook = hook


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
