"""What a rule hands back, and how findings become faults and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import Fault


class Finding(NamedTuple):
    """One thing that a rule found: the fields it is about (the first one is named), and the sentence."""

    about: tuple[str, ...]  # "section.field"
    what: str
    remedy: str = ""
    note: bool = False  # worth saying, but no fault
    passes_there: bool = False  # kohya's scripts pass the field over: at their entry point that is said, and no fault


# the configuration, and the fields that somebody asked for
Rule = Callable[[TrainConfig, set[str]], Iterable[Finding]]


def check(
    cfg: TrainConfig,
    rules: Sequence[Rule],
    requested: set[str],
    faulted: set[str],
    origins: dict[str, str],
    noted: set[str] | None = None,
    passed_over: set[str] | None = None,
) -> tuple[list[Fault], list[str]]:
    """Apply every rule; a finding about a field that is faulted already is left out.

    origins: where each field that was given came from; one that was not is called by its option. noted: takes the fields
    of which something was said. passed_over: at kohya's entry point, takes the fields that his scripts would pass over.
    """
    faults: list[Fault] = []
    notes: list[str] = []
    for rule in rules:
        for finding in rule(cfg, requested):
            if faulted.intersection(finding.about):
                continue
            if finding.passes_there and passed_over is not None:
                passed_over.add(finding.about[0])
                finding = finding._replace(what=f"has no effect, as in kohya's scripts: it {finding.what}", note=True)
            fault = Fault(origins.get(finding.about[0]) or option(finding.about[0]), finding.what, finding.remedy)
            if finding.note:
                notes.append(str(fault))
                if noted is not None:
                    noted.update(finding.about)
            else:
                faults.append(fault)
    return faults, notes


def value_of(cfg: TrainConfig, path: str) -> Any:
    """Return the value of "section.field"."""
    section, _, field = path.partition(".")
    return getattr(getattr(cfg, section), field)
