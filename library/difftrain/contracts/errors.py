"""Errors that a user can cause, and the exit code of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Describe one fault: what is wrong, the value, where it came from, what would be right."""

    where: str  # the flag, file or table: "--train_batch_size", "dataset.toml [general]"
    what: str  # "must be at least 1, got 0"
    remedy: str = ""  # "give the number of images a card takes in one micro batch"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" ({self.remedy})" if self.remedy else "")


class DifftrainError(Exception):
    """Base of errors that are shown without a traceback."""

    exit_code = 1


class ConfigFault(DifftrainError):
    """Carry every fault of a configuration, so that all are reported at once; exit code 2."""

    exit_code = 2

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(f"  {fault}" for fault in self.faults))

    def __reduce__(self) -> tuple[type[ConfigFault], tuple[list[Fault]]]:
        """Let ranks hand it to one another."""
        return type(self), (self.faults,)


class DataFault(DifftrainError):
    """Say that the data cannot be trained on (missing, empty, too much rejected); exit code 2."""

    exit_code = 2


class TrainingFault(DifftrainError):
    """Say that a run had to stop (non-finite steps in a row, full disk, a lost rank); exit code 1."""
