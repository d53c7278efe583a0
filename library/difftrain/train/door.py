"""What every training door does once its command line is sound: describe the run, or train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

from difftrain.config.door import print_notes
from difftrain.config.hidden_imports import collect_again
from difftrain.config.open_files import make_room
from difftrain.config.parse_flags import Parsed
from difftrain.config.paths import expecting
from difftrain.config.rules.finding import Rule
from difftrain.config.rules.optimizer import one_of
from difftrain.device.choice import KINDS, calm_threads, hide_unusable_npu, hold_autoload
from difftrain.distributed.launch import end_with_launcher
from difftrain.report.progress import SIGNS

RULES: tuple[Rule, ...] = (one_of("training.device", ("auto", *KINDS)),)


def look(parsed: Parsed) -> int:
    """Describe the run, the data set, or both; train nothing."""
    if parsed.dry_run:
        from difftrain.train.estimate.dry_run import dry_run

        with expecting(parsed.coming) if parsed.coming else nullcontext():
            dry_run(
                parsed.config,
                lambda text: print(text, flush=True),
                parsed.coming,
                full=parsed.bare["dry_run"] == "full",
                for_ranks=parsed.bare.get("dry_run_ranks", ""),
                progress=_heard,
            )
        if parsed.coming:  # the rest looks at what is not made yet
            return 0
    collect_again()
    if parsed.debug_dataset:
        from difftrain.train.inspect import debug_dataset

        debug_dataset(parsed.config)
    if folder := parsed.bare.get("dump_dataset"):
        from difftrain.train.dump import dump_dataset

        dump_dataset(parsed.config, folder)
    return 0


def _heard(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    SIGNS.heard()


def work(parsed: Parsed, prog: str, apply_for: Callable[[str, str], list[str]]) -> int:
    """Train, or say what would be trained; torch is imported here, where the configuration is known to be sound.

    apply_for: applies the patches of other people's packages that an engine needs with an optimizer, and says which.
    """
    if note := make_room(parsed.config.data.workers):
        print_notes(prog, [note])
    hold_autoload()
    calm_threads()
    end_with_launcher()
    hide_unusable_npu(parsed.config.training.device)
    is_first = os.environ.get("RANK", "0") == "0"
    printed = SIGNS.printed_by(lambda text: print_notes(prog, [text])) if is_first else nullcontext()
    if parsed.dry_run or parsed.debug_dataset or "dump_dataset" in parsed.bare:
        with printed, SIGNS.doing("looking at the run"):
            return look(parsed)
    print_notes(prog, apply_for(parsed.config.training.engine, parsed.config.optimizer.type))

    # on a slow disk the imports alone take a minute
    with printed, SIGNS.doing("loading PyTorch and the model libraries"):
        from difftrain.train.run import run

        SIGNS.now("starting")
        return run(parsed.config, list(parsed.argv), parsed.explicit)
