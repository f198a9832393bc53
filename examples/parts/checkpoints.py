"""The checkpoints of a run: whole or not there at all, and of the run's own configuration."""

import errno
import inspect
import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp


class RunError(Exception):
    """What ends a run that had begun, and what to do."""


class Checkpoints:
    """The last checkpoints of a run, each with the configuration that it was made with: `stored`, of the one resumed.

    Orbax writes a checkpoint into a folder of its own and names it last: one that was cut off is never taken for whole.
    The rest of it is removed by a run that writes; who only reads changes nothing in the folder. Errors name the
    `option` that gave the folder.

    Raises:
      ValueError: if there are checkpoints and the run is not to be resumed, or none and it is; if the one to resume is
        of another configuration, or is none of this program's.
    """

    def __init__(
        self,
        folder: Path,
        configuration: dict[str, Any],
        resume: int | None,
        read_only: bool = False,
        option: str = "--out",
    ) -> None:
        if resume is not None and not folder.is_dir():
            raise ValueError(f"there is no checkpoint in {folder}: train first, or correct {option}")
        self.option = option
        _report_once()
        self.manager = _open(folder.absolute(), read_only)
        self.configuration, self.stored = configuration, {}
        self.step = self._find(resume)
        if self.step:
            self._check_configuration(self.step)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.manager.close()
        except Exception:
            if error is None:
                raise  # else that is the one to report

    def _find(self, resume: int | None) -> int:
        steps, folder = sorted(self.manager.all_steps()), self.manager.directory
        if resume is None:
            if steps:
                raise ValueError(f"{folder} holds a run: continue it with --resume, or choose another {self.option}")
            return 0
        if not steps:
            raise ValueError(f"there is no checkpoint in {folder}: train first, or correct {self.option}")
        if resume and resume not in steps:
            raise ValueError(f"--resume {resume}: the checkpoints in {folder} are of steps {steps}: name one of these")
        return resume or steps[-1]

    def _check_configuration(self, step: int) -> None:
        try:
            found = self.manager.metadata(step).custom_metadata
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not found:
            raise self._unreadable(step, ValueError("it names no configuration"))
        own, self.stored = self.configuration, dict(found)
        names = [name for name in own if own[name] != found.get(name)]
        if names:
            differences = ", ".join(f"{name} {found.get(name)} there and {own[name]} here" for name in names)
            raise ValueError(
                f"checkpoint {step} in {self.manager.directory} is of another configuration ({differences}): give the "
                f"same, or choose another {self.option}"
            )

    def restore(self, abstract: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays of the checkpoint to resume, laid out as the abstract ones say.

        A run that writes loses the later ones.
        """
        try:
            restored = self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:
            raise self._unreadable(self.step, error) from error
        for step in self.manager.all_steps():
            if step > self.step:
                self.manager.delete(step)
        return dict(restored)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint while the run goes on.

        Raises:
          RunError: if this one or the one before it could not be written.
        """
        args, configuration = ocp.args.StandardSave(state), self.configuration
        self._write(lambda: self.manager.save(step, args=args, custom_metadata=configuration))

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
            raise self.lost(f"a checkpoint could not be written: {_reason(error)}", "make room") from error

    def lost(self, reason: str, remedy: str) -> RunError:
        """Returns the error of a run that ends: why, what is left of it, and the remedy."""
        self.manager.reload()
        step = max(self.manager.all_steps(), default=None)
        rest = "there is no checkpoint yet" if step is None else f"the last whole checkpoint is of step {step}"
        way = "start again" if step is None else "go on with --resume"
        return RunError(f"{reason}; {rest} in {self.manager.directory}: {remedy}, and {way}")

    def _unreadable(self, step: int, error: Exception) -> ValueError:
        earlier = [other for other in self.manager.all_steps() if other < step]
        remedy = f"go on from the one before it with --resume {max(earlier)}" if earlier else "start again elsewhere"
        return ValueError(
            f"checkpoint {step} in {self.manager.directory} is damaged, or not this program's ({_reason(error)}): "
            + remedy
        )


def _open(folder: Path, read_only: bool) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints so that as little as can be stays in the memory of a process that writes many.

    With a file for each piece of an array, as the database that Orbax writes otherwise leaves 0.1 MiB at each
    checkpoint; and with few pieces: below a mebibyte a replica's own piece is not worth the program that cuts it.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
    ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
    state = ocp.StandardCheckpointHandler(use_ocdbt=False)
    # The manager removes what was cut off in the background, and does not wait for it when closed.
    writing = {} if read_only else {"max_to_keep": 2, "cleanup_tmp_directories": True}
    options = ocp.CheckpointManagerOptions(read_only=read_only, **writing)
    return ocp.CheckpointManager(folder, options=options, item_handlers=state)


def _report_once() -> None:
    """Keeps quiet Orbax's threads, each of which would print in full an error that is reported here in a line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    hook = sys.unraisablehook
    # Orbax reads arrays by coroutines, and leaves the rest alone when one has failed.
    is_late = lambda found: inspect.iscoroutine(found.object) or "loop is closed" in str(found.exc_value)
    sys.unraisablehook = lambda found: None if is_late(found) else hook(found)


def _reason(error: Exception) -> str:
    """Returns the first line of an error, and what a full disk is called everywhere."""
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else next(iter(str(error).splitlines()), type(error).__name__)[:300]
