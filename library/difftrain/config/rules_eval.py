"""What evaluation sets need, and what needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from difftrain.config.finding import Finding, Rule
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig

_NO_SET = "has no effect: there is no evaluation set (eval_datasets)"
_NO_KID = "needs kid = true: no pictures are drawn for a KID"
_TAKEN = frozenset({"train", "loss", "lr", "speed", "memory", "progress"})  # what other numbers' tags begin with

# published files say how often to evaluate and leave the sets to be filled in: told, no fault
NEEDS: tuple[Need, ...] = (
    *(
        Need(f"eval.{field}", lambda c: c.eval.sets, _NO_SET, note=True)
        for field in ("every_n_steps", "every_n_epochs", "every_n_examples", "before_first_step", "batch_size")
    ),
    Need("eval.kid", lambda c: c.eval.sets, "needs an evaluation set (eval_datasets) to compare with"),
    *(
        Need(f"eval.{field}", lambda c: c.eval.kid, _NO_KID)
        for field in ("kid_pictures", "kid_every_n_steps", "kid_guidance", "kid_steps")
    ),
)


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def names(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """The names of evaluation sets stand before their numbers: each its own, and nobody else's."""
    count = Counter(each.name for each in cfg.eval.sets)
    for name, times in count.items():
        if times > 1:
            yield Finding(("eval.sets",), f"{times} evaluation sets are called {name!r}", "give each a name of its own")
        elif not name.strip():
            yield Finding(("eval.sets",), "an evaluation set has no name", "its numbers are logged as NAME/loss")
        elif name.split("/")[0] in _TAKEN:
            what = f"an evaluation set is called {name!r}, and so are other numbers of the run"
            yield Finding(("eval.sets",), what, f"any name does that doesn't begin with {', '.join(sorted(_TAKEN))}")


def pictures(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A distance between two handfuls of pictures is chance."""
    if cfg.eval.kid and cfg.eval.kid_pictures < LEAST_PICTURES:
        what = f"must be at least {LEAST_PICTURES}, got {cfg.eval.kid_pictures}"
        yield Finding(("eval.kid_pictures",), what, "fewer say nothing; some hundreds are better")


LEAST_PICTURES = 20

RULES: tuple[Rule, ...] = (companions, names, pictures)
