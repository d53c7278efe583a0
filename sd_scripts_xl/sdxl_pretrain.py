"""Pretrain or fine-tune Stable Diffusion XL: --help lists the flags, docs/flags.md says what each means."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "library"))  # runs from any folder, installed or not
sys.path.append(str(ROOT))  # third_patch

from difftrain.config.door import open_door, say  # noqa: E402
from difftrain.config.parse import Parsed  # noqa: E402
from difftrain.config.rules_names import one_of  # noqa: E402
from difftrain.device.choice import KINDS, calm_threads, hide_unusable_npu, hold_autoload  # noqa: E402
from difftrain.distributed.launch import end_with_launcher  # noqa: E402

PROG = "sdxl_pretrain.py"


def look(parsed: Parsed) -> int:
    """Describe the run, the data set, or both; train nothing."""
    if parsed.dry_run:
        from difftrain.train.dry_run import dry_run

        dry_run(parsed.config)
    if parsed.debug_dataset:
        from difftrain.train.inspect import debug_dataset

        debug_dataset(parsed.config)
    return 0


def work(parsed: Parsed) -> int:
    """Train, or say what would be trained; torch is imported here, where the configuration is known to be sound."""
    hold_autoload()
    calm_threads()
    end_with_launcher()
    hide_unusable_npu(parsed.config.training.device)
    if parsed.dry_run or parsed.debug_dataset:
        return look(parsed)
    from third_patch import apply_for

    say(PROG, apply_for(parsed.config.training.engine, parsed.config.optimizer.type))
    from difftrain.train.run import run

    return run(parsed.config, list(parsed.argv))


if __name__ == "__main__":
    sys.exit(open_door(PROG, sys.argv[1:], work, [one_of("training.device", ("auto", *KINDS))]))
