"""The limit on open files: raised as far as a process may, refused where a run cannot work with it, named where it is met.

Loader processes hand tensors over as open files. Where a process has no more of them, it can neither receive a tensor nor
say so, and the run would wait for ever.
"""

from __future__ import annotations

import contextlib
import errno

from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import ConfigFault, Fault

ENOUGH = 4096
BASE, OF_A_WORKER = 64, 8  # measured: 24 for a run of one process, 5 for each loader process; and some to spare
REMEDY = (
    f"raise it: `ulimit -n {ENOUGH}` in the shell that starts the run; docker has the option ulimit nofile={ENOUGH}"
)


def limits() -> tuple[int, int] | None:
    """Return how many files this process may open, and how far it may raise that; None where there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinity = resource.RLIM_INFINITY
    return (1 << 30 if soft == infinity else soft), (1 << 30 if hard == infinity else hard)


def make_room(workers: int) -> str:
    """Raise a low limit as far as it may be, and return the sentence that says so. workers: loader processes of a run.

    Raises: ConfigFault where it stays too low for the run.
    """
    if (current := limits()) is None:
        return ""
    soft, hard = current
    note = ""
    if soft < ENOUGH and soft < hard:
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (min(hard, ENOUGH), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
            note = f"the limit on open files of this process is raised from {soft} to {min(hard, ENOUGH)}"
            soft = min(hard, ENOUGH)
    if soft < (least := BASE + OF_A_WORKER * workers):
        what = f"a process may open {soft} files here, and a run with {option('data.workers')}={workers} needs {least}"
        raise ConfigFault([Fault("limit on open files (ulimit -n)", what, REMEDY)])
    return note


def met(error: BaseException | None) -> str:
    """Return the sentence for an error that comes from the limit, or from the machine's; nothing for any other."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.ENFILE:
            return (
                "the machine has no more open files to give (fs.file-max of sysctl): end other processes, or raise it"
            )
        if number == errno.EMFILE or "Too many open files" in str(error):
            most = current[0] if (current := limits()) else "no more"
            return f"this process may open {most} files, the limit on open files (ulimit -n), and needs more; {REMEDY}"
        error = error.__cause__ or error.__context__
    return ""
