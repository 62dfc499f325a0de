"""One memory cap for a measured process, page cache included: a cgroup where this user may make one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_NAME = "vismmoe-bench"


@dataclass(frozen=True)
class MemoryCap:
    """A cgroup with a limit, or (folder None) no more than the process's own budget. Use as a context manager."""

    limit_bytes: int
    folder: Path | None

    @classmethod
    def make(cls, limit_bytes: int) -> MemoryCap:
        """A new cgroup below this process's own; without the rights, a cap that only budgets keep."""
        for base, limit in ((_v1_group(), "memory.limit_in_bytes"), (_v2_group(), "memory.max")):
            if base is None:
                continue
            folder = base / f"{_NAME}-{os.getpid()}"
            try:
                folder.mkdir(exist_ok=True)
                (folder / limit).write_text(str(limit_bytes))
            except OSError:
                with suppress(OSError):
                    folder.rmdir()
                continue
            return cls(limit_bytes, folder)
        return cls(limit_bytes, None)

    @property
    def kind(self) -> str:
        return "process budget only, page cache not counted" if self.folder is None else "cgroup, page cache counted"

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a program within the cap; its errors go where this process's go."""
        words = list(command)
        if self.folder is not None:  # the new process enters by itself, before it has any memory worth counting
            enter = (
                "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
            )
            words = [sys.executable, "-S", "-c", enter, str(self.folder / "cgroup.procs"), *words]
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)

    def close(self) -> None:
        """Remove the cgroup. Twice is harmless."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / "memory.force_empty").write_text("0")
            with suppress(OSError):
                self.folder.rmdir()

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _v1_group() -> Path | None:
    if not (_V1 / "memory.limit_in_bytes").exists():
        return None
    return _own_group(_V1, ":memory:")


def _v2_group() -> Path | None:
    return _own_group(_V2, "0::") if (_V2 / "cgroup.controllers").exists() else None


def _own_group(mount: Path, mark: str) -> Path:
    """This process's cgroup below `mount`; the mount itself where a container hides its place in the tree."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if mark in line:
                own = mount / line.rpartition(":")[2].lstrip("/")
                return own if own.is_dir() else mount
    return mount
