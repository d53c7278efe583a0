"""Two traces against one another as lines for people and as plain data: what `difftrain compare --trace` prints and writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from difftrain.report.compare.parting import ROOT, Parting
from difftrain.report.trace import AGREE, NOT_COMPARABLE, PART, TARGET, Difference, StepComparison, TraceComparison

# ---------------------------------------------------------------------- lines for people


# what the network reads, by the beginning of its name -> what makes it
_MAKERS = (
    ("timestep", "noise schedule"), ("x_t", "latents, noise or timestep"), ("conditions.hidden", "text encoder"),
    ("conditions.pooled", "text encoder"), ("conditions.tokens", "text encoder"), (TARGET, "what the loss compares with"),
)  # fmt: skip
_SHOWN = 12  # modules that still agreed; the number is of all


def sentences(comparison: TraceComparison) -> Iterator[str]:
    """Say what was found, a line each; the first module that differs stands on its own line."""
    first = comparison.steps[0]
    yield f"A: {first.a.path.parent} ({first.a.describe()})"
    yield f"B: {first.b.path.parent} ({first.b.describe()})"
    if first.a.facts["config"] != first.b.facts["config"]:
        yield "their configurations differ: difftrain compare lists the settings"
    for step in comparison.steps:
        yield from _of_step(step)
    if comparison.left:
        yield f"{comparison.left} more traced in both were not compared"
    verdict = {AGREE: "they agree", PART: "they differ", NOT_COMPARABLE: "they cannot be compared"}
    yield f"verdict: {verdict[comparison.code]}"


def _of_step(step: StepComparison) -> Iterator[str]:
    where = f"step {step.step}, rank {step.rank}"
    if step.alone:
        names = ", ".join(step.alone[:4]) + (" ..." if len(step.alone) > 4 else "")
        yield f"{where}: {len(step.alone)} modules are called in only one of them (fused, or left out): {names}"
    if step.code == NOT_COMPARABLE:
        yield (
            f"{where}: the network's inputs differ, so nothing after them can be compared (another batch: different samples, "
            "or another order)"
        )
        yield from (f"  {_in_words(difference)}" for difference in step.inputs)
    elif step.parting is None:
        yield f"{where}: {step.modules} modules agree, forward and backward"
        if step.unequal is None or step.largest is None:
            yield "  bit-identical"
        else:
            yield f"  the first difference of any size: {_in_words(step.unequal)}"
            yield f"  the closest to its tolerance: {_in_words(step.largest)}"
    else:
        assert step.difference is not None
        yield from _of_parting(step, step.parting, step.difference)


def _of_parting(step: StepComparison, parting: Parting, difference: Difference) -> Iterator[str]:
    micro, _, number = parting.call.partition(".")
    yield f"step {step.step}, rank {step.rank}: they differ"
    at_the_network = parting.module == ROOT and parting.role.startswith(("input.", TARGET))
    if at_the_network:
        yield f"first module that differs: {parting.module}, {parting.role} ({_maker(parting.role)})"
    else:
        yield f"first module that differs: {parting.module} ({parting.kind})"
    block = max(
        (name for name in json.loads(step.a.facts["blocks"]) if _holds(name, parting.module)), key=len, default=""
    )
    if block and block != parting.module:
        yield f"  block: {block}"
    yield f"  direction: {parting.direction}, call {number} of micro batch {micro}, {parting.role}"
    yield f"  {_in_words(difference)}"
    if hint := _hint(parting):
        yield f"  {hint}"
    if at_the_network and len(step.inputs) > 1:
        others = [other.tensor for other in step.inputs if other.tensor != difference.tensor]
        yield f"  of what the network reads and its loss compares with, these differ too: {', '.join(others)}"
    if step.unequal is not None and step.unequal.tensor != difference.tensor:
        yield f"  before that, within its tolerance, the first difference of any size: {_in_words(step.unequal)}"
    shown = parting.good[-_SHOWN:]
    more = f"{len(parting.good) - len(shown)} before, then " if len(parting.good) > len(shown) else ""
    yield f"  modules before it that agree: {len(parting.good)}" + (f" ({more}{', '.join(shown)})" if shown else "")


def _maker(role: str) -> str:
    """Say what makes an input of the network, or what its loss compares with."""
    name = role.removeprefix("input.")
    return next((maker for start, maker in _MAKERS if name.startswith(start)), "conditions")


def _holds(block: str, module: str) -> bool:
    return module == block or module.startswith(f"{block}.")


def _in_words(difference: Difference) -> str:
    shape = ", ".join(map(str, difference.shape))
    return (
        f"{difference.tensor}: relative error {difference.error:.3g}, tolerance {difference.tolerance:.3g} "
        f"({difference.dtype}, shape ({shape}))"
    )


def _hint(parting: Parting) -> str:
    """Say where to look, in the code around the place that is named."""
    if parting.direction == "parameter":
        return "the gradients of all activations agree: this module's own gradient sum, or its reduction over the ranks, is wrong"
    if parting.direction == "forward":
        if parting.role.startswith("input.") and not parting.between:
            return "the samples are the same and no traced module made it: look at what computes it, or at its cache"
        if not parting.between:
            return ""
        return f"its inputs and the parts called before agree: the difference arises in its own code, which computes what {parting.between} reads"
    if parting.maker == parting.module and parting.module == ROOT:
        return "it is the gradient from the loss to the network: look at its target, weights or scale"
    if parting.maker == parting.module:
        return "it is the gradient at its output: look at the code after it, or its own backward pass"
    also = f", as do {', '.join(parting.readers)}" if parting.readers else ""
    whose = f" the output of {parting.maker}" if parting.maker else " a tensor"
    return f"the gradients at its outputs agree; it returns the gradient of{whose}, which it reads{also}"


# ---------------------------------------------------------------------- as plain data


def document(comparison: TraceComparison) -> dict[str, Any]:
    """Return all of it as JSON has it; an error that is no finite number is null."""
    return {
        "verdict": {AGREE: "agree", PART: "part", NOT_COMPARABLE: "not comparable"}[comparison.code],
        "exit_code": comparison.code,
        "steps": [_step_document(step) for step in comparison.steps],
        "not_looked_at": comparison.left,
    }


def _step_document(step: StepComparison) -> dict[str, Any]:
    return {
        "step": step.step,
        "rank": step.rank,
        "exit_code": step.code,
        "traces": [str(step.a.path), str(step.b.path)],
        "modules": step.modules,
        "called_in_one_only": list(step.alone),
        "same_samples": step.same_records,
        "inputs_that_differ": [_difference_document(difference) for difference in step.inputs],
        "first_module_that_parts": asdict(step.parting) if step.parting is not None else None,
        "difference": _difference_document(step.difference),
        "nearest_to_its_tolerance": _difference_document(step.largest),
        "first_unequal": _difference_document(step.unequal),
    }


def _difference_document(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return asdict(difference) | {"error": difference.error if math.isfinite(difference.error) else None}
