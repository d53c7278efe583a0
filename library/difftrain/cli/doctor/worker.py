"""The process that does the checks: `python -m difftrain.cli.doctor.worker PIPE ORDER`, a JSON line a check.

The first line, {}, says that it is there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from difftrain.contracts.errors import ConfigFault, DifftrainError
from difftrain.device.choice import hold_autoload
from difftrain.device.health import Context, HealthFinding


def main(pipe: int, order: dict[str, Any]) -> None:
    """Do the checks of an order, and tell what each found."""
    hold_autoload()
    gc.disable()  # for good: checks import for seconds, and the process ends with them
    context = Context(**order["context"])
    with os.fdopen(pipe, "w") as out:
        print("{}", file=out, flush=True)
        for name, target in order["checks"].items():
            start = time.monotonic()
            results = findings(name, target, context)
            message = {
                "name": name,
                "findings": results,
                "seconds": time.monotonic() - start,
                "usable": "device" in context.__dict__,
            }
            print(json.dumps(message), file=out, flush=True)


def findings(name: str, target: str, context: Context) -> list[HealthFinding]:
    """Do one check; what it raises is its finding, after what it found before."""
    results: list[HealthFinding] = []
    try:
        module, _, function = target.partition(":")
        results.extend(getattr(import_module(module), function)(context))
    except ConfigFault as error:
        results += [
            HealthFinding("wrong", f"{fault.where}: {fault.what}", fault.remedy or "mend it") for fault in error.faults
        ]
    except DifftrainError as error:
        results.append(HealthFinding("wrong", f"{name}: {error}", "see the message"))
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        results.append(
            HealthFinding(
                "wrong", f"{name}: {type(error).__name__}: {text}", "report it together with the output of --json"
            )
        )
    return results


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
