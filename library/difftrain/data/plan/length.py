"""How long a run is: by epochs, by steps, or by what comes first."""

from __future__ import annotations

from difftrain.config import TrainingSection
from difftrain.config.spellings.spelling import option
from difftrain.data.plan.plan import EpochPlan


def why(training: TrainingSection, plan: EpochPlan) -> str:
    """Say what ends the run."""
    if not training.max_epochs:
        return f"by {option('training.max_steps')}"
    epochs = f"{training.max_epochs} epoch{'s' if training.max_epochs > 1 else ''}"
    if not training.first_limit:
        return f"by {option('training.max_epochs')}={training.max_epochs}"
    steps = plan.total_steps(training.max_epochs)
    if steps <= training.max_steps:
        return f"by {epochs}, which come before the {training.max_steps} steps of max_steps"
    return f"by max_steps, which comes before the {steps} steps of {epochs}"


def total_steps(training: TrainingSection, plan: EpochPlan) -> int:
    """Return the steps of the whole run; epochs win over steps, unless what comes first is asked for."""
    if not training.max_epochs:
        return training.max_steps
    steps = plan.total_steps(training.max_epochs)
    return min(steps, training.max_steps) if training.first_limit else steps
