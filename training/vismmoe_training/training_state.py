"""What an unfinished training leaves beside its output: checkpoints, its settings, its MLflow run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vismmoe.errors import UsageError
from vismmoe.trace import write_atomically
from vismmoe_training.registry import TrackedRun


class TrainingState:
    """The folder `<output>.training`: checkpoints, the settings they were made with, the MLflow run they belong to."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._settings = folder, settings

    def open(self, experiment: str, uri: str | None, resume: bool) -> TrackedRun:
        """The run to log into: a new one, or with `resume` the interrupted one. Raises UsageError."""
        if resume:
            known = self._known()
            self._check(known["settings"])
            return TrackedRun.resume(known["tracking_uri"], known["run_id"])
        self._abandon()
        run = TrackedRun.start(experiment, uri, {"vismmoe.command": "train"})
        run.log(params=self._settings)
        self.folder.mkdir(parents=True)
        told = {"settings": self._settings, "tracking_uri": run.uri, "run_id": run.run_id}
        write_atomically(self.folder / "state.json", json.dumps(told, indent=1).encode())
        return run

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _known(self) -> dict[str, Any]:
        try:
            known = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if not isinstance(known, dict) or not (self.folder / "last.ckpt").is_file():
            raise UsageError(f"There is nothing to resume: {self.folder} holds no checkpoint. Train without --resume.")
        return known

    def _check(self, before: dict[str, Any]) -> None:
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--resume must go on with the same settings, but {name} was {before.get(name)!r} and is now "
                    f"{value!r}. Use the same, or train anew without --resume."
                )

    def _abandon(self) -> None:
        """An interrupted training that is not resumed: its run ends, its checkpoints go."""
        try:
            known = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
            run = TrackedRun(known["tracking_uri"], known["run_id"])
            if run.is_running():  # kill -9 left it so
                run.end("KILLED")
        except (OSError, ValueError, KeyError, TypeError, UsageError):
            pass  # no state, or its database is gone: nothing to end
        self.remove()
