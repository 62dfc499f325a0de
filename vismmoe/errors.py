"""What can go wrong, drawn as a tree; each branch has its own exit status.

    VisMMoEError           1  anything else that we foresaw
    ├── UsageError         2  flags, configuration, combinations that make no sense
    ├── InputError         3  data handed to us is unreadable or wrong
    │   ├── ImageError
    │   ├── CorpusError
    │   ├── CheckpointError
    │   └── ArtifactError
    └── BudgetError        4  does not fit the memory that was asked for

Messages are for people: what is wrong, which value, what to do.
"""

from __future__ import annotations


class VisMMoEError(Exception):
    """A failure that was foreseen and is told in a sentence."""

    exit_status = 1


class UsageError(VisMMoEError):
    """A flag, a configuration key or their combination is wrong."""

    exit_status = 2


class InputError(VisMMoEError):
    """Data from outside (image, corpus, checkpoint, artifact) is unreadable or wrong."""

    exit_status = 3


class ImageError(InputError):
    """An image cannot be read or is refused."""


class CorpusError(InputError):
    """A corpus or a folder of routing logs cannot be used."""


class CheckpointError(InputError):
    """A model folder is missing, damaged, or of a layout that we do not run."""


class ArtifactError(InputError):
    """A predictor artifact is missing, damaged, or made for another model."""


class BudgetError(VisMMoEError):
    """The request does not fit the memory that was asked for."""

    exit_status = 4
