"""Two runs side by side: whether step k was the same work, how far their losses are apart, and who was faster.

Step k of a run is a function of its seed, data, global batch and configuration, whatever it runs on. Where these are equal,
losses are compared step by step; where they are not, the reasons are named and only speeds are laid side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from difftrain.config.digest import FREE
from difftrain.config.schema.names import ASCEND
from difftrain.config.schema.validate import default_of, fields
from difftrain.config.spellings.spelling import option
from difftrain.report.compare.thresholds import Thresholds
from difftrain.report.report import ScoreTarget
from difftrain.report.run_files import FIGURES, LoggedStep, RunFiles

Effect = Literal["losses", "rounding", "length", "none"]

# of the fields that say what a run is, those that leave step k the same work but for rounding
ROUNDING = frozenset({
    "training.mixed_precision", "training.full_precision", "training.master_weights", "model.vae_fp32",
    "cache.latents_dtype", "cache.text_dtype", "cache.dtypes",
})  # fmt: skip
# how long the run is: its schedule may follow, which the recorded learning rates tell
LENGTH = frozenset({"training.max_steps", "training.max_epochs", "training.first_limit"})
# what is made of the weights beside training them
BESIDE = frozenset({"ema", "demo"})
# what is looked at by its value in effect: a seed may be drawn, a batch made up in other ways
BY_VALUE = frozenset({"training.seed", "global batch"})
# where the data lie, by names that machines give: of no interest where the records are known to be the same
NAMES = frozenset({"data.dirs", "data.reg_dirs", "data.in_json", "data.conditioning_dir", "data.control_dirs"})
HELD_OUT = frozenset({"validation.split", "validation.seed"})  # which records are left to train on, as a plan says
PATHS_OF_SUBSETS = (": image_dir", ": metadata_file", ": conditioning_dir", ": control_dirs", ": default_mask")
# the folder, and what was done once
OWN = frozenset({"save.output_dir", "save.output_name", "save.resume", "data.cache_dir"})
SAME_MATHS = {name.lower(): "adamw" for name in ("AdamW", "oss", *ASCEND)}  # sharded, fused: the same update


@dataclass(frozen=True)
class RunDifference:
    """One thing in which two runs differ. name: a setting as each entry point spells it, or what it is."""

    group: str
    name: str
    a: Any
    b: Any
    effect: Effect = "none"


@dataclass(frozen=True)
class Divergence:
    """The first step at which two runs part, and in what."""

    step: int
    what: str
    a: float
    b: float
    error: float
    limit: float


@dataclass(frozen=True)
class StepErrors:
    """Relative errors |b - a| / |a| at the common steps; NaN where neither is a finite number, else inf where one is not.

    running_mean: of the losses' errors up to each step. signed: mean of (b - a) / |a|: near the mean of the errors where
    one run is always above the other, near 0 where it is rounding.
    """

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    running_mean: tuple[float, ...]
    signed: float
    grad_norm: tuple[float, ...]
    lr: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean of the losses' errors."""
        return self.running_mean[-1]


@dataclass(frozen=True)
class RunComparison:
    """What there is to say of one run beside another. reasons: why losses are not compared step by step."""

    a: RunFiles
    b: RunFiles
    thresholds: Thresholds
    reasons: tuple[str, ...]
    errors: StepErrors | None
    divergence: Divergence | None
    checks: tuple[ScoreTarget, ...]
    differences: tuple[RunDifference, ...]

    @property
    def verdict(self) -> str:
        """Return agree, part, missed (a limit of speed or memory) or not comparable."""
        if self.reasons:
            return "not comparable"
        if self.divergence is not None:
            return "part"
        return "agree" if all(check.met for check in self.checks) else "missed"

    @property
    def exit_code(self) -> int:
        """Return 0 where they agree, 2 where they are not comparable, else 1."""
        return {"agree": 0, "not comparable": 2}.get(self.verdict, 1)

    def ratios(self) -> dict[str, float | None]:
        """Return the figures of b over those of a; nothing where one is not known."""
        a, b = self.a.figures(), self.b.figures()
        return {key: _ratio(a[key], b[key]) for key in FIGURES}


def compare_runs(a: RunFiles, b: RunFiles, overrides: Thresholds) -> RunComparison:
    """Compare a run with the first one. overrides: limits; what they leave open follows the precision of the two."""
    thresholds = overrides.for_precision(a.is_half or b.is_half)
    common = sorted(a.steps.keys() & b.steps.keys())
    reasons = tuple(_reasons(a, b, common))
    errors = divergence = None
    checks: list[ScoreTarget] = []
    if not reasons:
        errors = step_errors([a.steps[step] for step in common], [b.steps[step] for step in common])
        divergence = first_divergence(a, b, errors, thresholds)
        checks += _loss_checks(a, b, errors, thresholds)
    comparison = RunComparison(a, b, thresholds, reasons, errors, divergence, (), tuple(_differences(a, b)))
    ratios = comparison.ratios()
    limits = (
        ("min_fps_ratio", "fps", True),
        ("min_compute_fps_ratio", "compute_fps", True),
        ("max_memory_ratio", "peak_memory_gib", False),
    )
    for name, key, at_least in limits:
        limit, ratio = getattr(thresholds, name), ratios[key]
        if limit is not None:
            checks.append(ScoreTarget(name, math.nan if ratio is None else ratio, limit, at_least))
    return RunComparison(a, b, thresholds, reasons, errors, divergence, tuple(checks), comparison.differences)


# ---------------------------------------------------------------------- errors


def relative_error(a: float, b: float) -> float:
    """Return |b - a| / |a|: inf where only one is finite or only a is 0, NaN where neither is finite."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(b - a) / abs(a) if a else 0.0 if b == 0 else math.inf
    return math.inf if math.isfinite(a) or math.isfinite(b) else math.nan


def running_means(errors: list[float]) -> list[float]:
    """Return the mean of what is a number up to each place; NaN before the first."""
    sums = itertools.accumulate(0.0 if math.isnan(error) else error for error in errors)
    counts = itertools.accumulate(not math.isnan(error) for error in errors)
    return [total / count if count else math.nan for total, count in zip(sums, counts)]


def step_errors(a: list[LoggedStep], b: list[LoggedStep]) -> StepErrors:
    """Compare lines of the same steps."""
    loss = [relative_error(x.loss, y.loss) for x, y in zip(a, b)]
    signed = [error if y.loss >= x.loss else -error for x, y, error in zip(a, b, loss) if math.isfinite(error)]
    # a norm that is no number is an update that was skipped, which the counters tell
    norms = [_finite_error(x.grad_norm, y.grad_norm) for x, y in zip(a, b)]
    rates = [_finite_error(x.lr, y.lr) for x, y in zip(a, b)]
    return StepErrors(
        steps=tuple(line.step for line in a),
        loss=tuple(loss),
        running_mean=tuple(running_means(loss)),
        signed=math.fsum(signed) / len(signed) if signed else math.nan,
        grad_norm=tuple(norms),
        lr=tuple(rates),
    )


def _finite_error(a: float, b: float) -> float:
    return relative_error(a, b) if math.isfinite(a) and math.isfinite(b) else math.nan


def first_divergence(a: RunFiles, b: RunFiles, errors: StepErrors, limits: Thresholds) -> Divergence | None:
    """Return where two comparable runs part: the first step with anything beyond its limit, else where the mean passes its own."""
    step_limit, norm_limit = limits.step_relative_error or 0.0, limits.grad_norm_relative_error or 0.0
    for at, step in enumerate(errors.steps):
        x, y = a.steps[step], b.steps[step]
        if math.isnan(errors.loss[at]) or errors.loss[at] > step_limit:
            return Divergence(step, "step_loss", x.loss, y.loss, errors.loss[at], step_limit)
        if errors.lr[at] > step_limit:
            return Divergence(step, "lr", x.lr, y.lr, errors.lr[at], step_limit)
        if errors.grad_norm[at] > norm_limit:
            return Divergence(step, "grad_norm", x.grad_norm, y.grad_norm, errors.grad_norm[at], norm_limit)
        if _counts_skips(a, b) and x.skipped != y.skipped:
            return Divergence(step, "skipped", x.skipped, y.skipped, relative_error(x.skipped, y.skipped), 0.0)
    mean_limit = limits.mean_relative_error or 0.0
    if not errors.mean > mean_limit:
        return None
    # the step after which the mean stays above
    below = [at for at, mean in enumerate(errors.running_mean) if mean <= mean_limit]
    at = below[-1] + 1 if below else 0
    x, y = a.steps[errors.steps[at]], b.steps[errors.steps[at]]
    return Divergence(x.step, "mean_relative_error", x.loss, y.loss, errors.running_mean[at], mean_limit)


def _counts_skips(a: RunFiles, b: RunFiles) -> bool:
    """Tell whether both have to skip the same updates: the scale of fp16 is found by overflowing."""
    return "fp16" not in a.precision and "fp16" not in b.precision


def _loss_checks(a: RunFiles, b: RunFiles, errors: StepErrors, limits: Thresholds) -> Iterator[ScoreTarget]:
    def largest(values: tuple[float, ...]) -> float:
        return max((value for value in values if not math.isnan(value)), default=math.nan)

    def at_most(name: str, value: float, limit: float | None) -> ScoreTarget:
        return ScoreTarget(name, value, limit or 0.0, at_least=False)

    if limits.min_common_steps is not None:
        yield ScoreTarget("min_common_steps", len(errors.steps), limits.min_common_steps, at_least=True)
    yield at_most("mean_relative_error", errors.mean, limits.mean_relative_error)
    yield at_most("step_relative_error", largest(errors.loss), limits.step_relative_error)
    if not math.isnan(rate := largest(errors.lr)):
        yield at_most("step_relative_error of the learning rate", rate, limits.step_relative_error)
    if not math.isnan(norm := largest(errors.grad_norm)):
        yield at_most("grad_norm_relative_error", norm, limits.grad_norm_relative_error)
    if lost := sum(math.isnan(error) for error in errors.loss):
        yield at_most("steps without a finite loss in either run", lost, 0.0)
    if _counts_skips(a, b):
        apart = (abs(a.steps[step].skipped - b.steps[step].skipped) for step in errors.steps)
        yield at_most("skipped updates, apart", max(apart), 0.0)


def first_without_loss(run: RunFiles) -> int | None:
    """Return the first step whose loss is no finite number."""
    return next((step for step, line in run.steps.items() if not math.isfinite(line.loss)), None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


# ---------------------------------------------------------------------- is step k the same work?


def _reasons(a: RunFiles, b: RunFiles, common: list[int]) -> Iterator[str]:
    """Say why two runs cannot be compared step by step; nothing where they can."""
    # --- the seed and the size of a step
    for name, x, y in (("training.seed", a.seed, b.seed), ("global batch", a.global_batch, b.global_batch)):
        if x is None or y is None:
            yield f"{setting_name(name, a, b)} is unknown for {'both' if x is None and y is None else 'one of them'}"
        elif x != y:
            yield f"{setting_name(name, a, b)}: {_short(x)} and {_short(y)}"

    # --- the data and their order: a plan digest says all; it hashes seed and global batch, too
    yield from _data_reasons(a, b)

    # --- what was asked for
    if not a.identity or not b.identity:
        yield "the configuration is unknown for " + ("both" if a.identity == b.identity else "one of them")
    else:
        yield from (
            f"{difference.name}: {_short(difference.a)} and {_short(difference.b)}"
            for difference in _identity_differences(a, b)
            if difference.effect == "losses"
        )

    # --- the steps themselves
    if not common:
        yield "no step is recorded in both"
    for step in common:
        x, y = a.steps[step], b.steps[step]
        if x.samples_seen != y.samples_seen or x.epoch != y.epoch:
            yield (
                f"step {step} is at a different position in the data: epoch {x.epoch} and {y.epoch}, "
                f"after {x.samples_seen} and {y.samples_seen} samples"
            )
            break
    if any(a.config.get(path) != b.config.get(path) for path in LENGTH):
        for step in common:
            x, y = a.steps[step], b.steps[step]
            if _finite_error(x.lr, y.lr) > 1e-6:
                yield f"schedules of different lengths: at step {step} the learning rate is {x.lr:g} and {y.lr:g}"
                break


def _data_reasons(a: RunFiles, b: RunFiles) -> Iterator[str]:
    for run in (a, b):
        if len(run.plan_digests) > 1:
            yield f"the data or its order changed between the sessions of {run.folder}"
    if len(a.plan_digests) == len(b.plan_digests) == 1:
        same_draws = a.seed == b.seed and a.global_batch == b.global_batch  # else that has just been said
        if a.plan_digests != b.plan_digests and (same_draws or a.fingerprint != b.fingerprint):
            yield "the data or its order differs: the plan digests are different"
    elif not a.fingerprint or not b.fingerprint:
        yield "whether the data is the same is unknown: neither plan digests nor fingerprints of both are recorded"
    elif a.fingerprint != b.fingerprint:
        yield f"the data differs: the fingerprints are {a.fingerprint} and {b.fingerprint}"


def _has_same_plan(a: RunFiles, b: RunFiles) -> bool:
    return len(a.plan_digests) == 1 and a.plan_digests == b.plan_digests


def effect_of(path: str) -> Effect:
    """Return what a difference in a field does to step k."""
    if path in ROUNDING:
        return "rounding"
    if path in LENGTH:
        return "length"
    section = path.partition(".")[0]
    return "none" if {path, section} & (BESIDE | (FREE - {"cache"})) or path.startswith("cache.") else "losses"


def _identity_differences(a: RunFiles, b: RunFiles) -> Iterator[RunDifference]:
    """Yield the fields of what the runs are that differ, as RunRecord has them."""
    known, same_plan = set(fields()), _has_same_plan(a, b)
    same_data = same_plan or (bool(a.fingerprint) and a.fingerprint == b.fingerprint)
    for path in sorted((a.identity.keys() | b.identity.keys()) - BY_VALUE):
        default = default_of(path) if path in known else None  # a field that one of the versions did not have
        x, y = (_normal(path, run.identity.get(path, default)) for run in (a, b))
        if x == y or (same_plan and path in HELD_OUT):
            continue
        if same_data and (path in NAMES or path.endswith(PATHS_OF_SUBSETS)):
            continue
        in_cache = path.startswith("cache.") and path not in ROUNDING  # the identity has those alone that count
        yield RunDifference("configuration", setting_name(path, a, b), x, y, "losses" if in_cache else effect_of(path))


def _normal(path: str, value: Any) -> Any:
    if path == "optimizer.type" and isinstance(value, str):
        return SAME_MATHS.get(value.lower(), value)
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------------- in what they differ


def setting_name(path: str, a: RunFiles, b: RunFiles) -> str:
    """Return how the entry points of two runs spell a field, which may be no field."""
    if path not in set(fields()):
        return path
    return " or ".join(dict.fromkeys(option(path, door=run.door) for run in (a, b)))  # type: ignore[arg-type]


def _differences(a: RunFiles, b: RunFiles) -> Iterator[RunDifference]:
    """Yield everything in which two runs differ, but their losses and speeds."""
    # --- the configuration: what bears on the losses first
    known = a.identity and b.identity
    by_name = {difference.name: difference for difference in _identity_differences(a, b)} if known else {}
    for path in sorted(a.config.keys() | b.config.keys()):
        x, y = a.config.get(path), b.config.get(path)
        name = setting_name(path, a, b)
        if x != y and path not in OWN and name not in by_name:
            # what is no part of the identity bears on nothing; without one nobody can tell
            effect: Effect = "losses" if path in BY_VALUE else "none" if known else effect_of(path)
            by_name[name] = RunDifference("configuration", name, x, y, effect)
    if a.global_batch != b.global_batch:
        by_name[""] = RunDifference("configuration", "global batch", a.global_batch, b.global_batch, "losses")
    order = ("losses", "rounding", "length", "none")
    yield from sorted(by_name.values(), key=lambda difference: order.index(difference.effect))

    # --- what it ran on, and with what; of a run without a report only what the sessions say
    x, y = a.report, b.report
    yield from _table_differences("version", x.get("versions"), y.get("versions"))
    yield from _table_differences("machine", x.get("machine"), y.get("machine"))
    yield from _table_differences("device", *(_device(run) for run in (a, b)))
    for name in ("code_version", "attention", "weights"):
        of_a, of_b = (report.get(name) for report in (x, y))
        if None not in (of_a, of_b) and of_a != of_b:
            heading = f"{name}: "  # the sentence on attention begins with it
            values = [str(value).removeprefix(heading) for value in (of_a, of_b)]
            yield RunDifference("run", name.replace("_", " "), values[0], values[1])
    if a.world_size != b.world_size:
        yield RunDifference("run", "cards", a.world_size, b.world_size)

    # --- the data and the weights as they were found
    yield from _table_differences("data", x.get("dataset"), y.get("dataset"))
    if a.plan_digests != b.plan_digests:
        plans = [", ".join(sorted(run.plan_digests)) or None for run in (a, b)]
        yield RunDifference("data", "plan digest", plans[0], plans[1])
    yield from _table_differences("fetched from a hub", a.record.get("hub"), b.record.get("hub"))


def _device(run: RunFiles) -> Any:
    """Return what the report says of the device, without what is among the versions."""
    device, versions = run.report.get("device"), run.report.get("versions")
    if not isinstance(device, dict) or not isinstance(versions, dict):
        return None
    return {key: value for key, value in device.items() if key not in versions and value is not None}


def _table_differences(group: str, a: Any, b: Any) -> Iterator[RunDifference]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return
    for key in sorted((a.keys() | b.keys()) - {"index", "reason"}):
        if a.get(key) != b.get(key):
            yield RunDifference(group, str(key), a.get(key), b.get(key))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
