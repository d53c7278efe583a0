"""Checkpoints: whole or absent. The commit, finding the newest whole one, retention, and one run a folder."""

from difftrain.checkpoint.claim import Claim, claim_together
from difftrain.checkpoint.commit import Manifest, SaveFault, Torn, commit, load_meta, verify
from difftrain.checkpoint.find import (
    DIFFUSERS,
    STEPS,
    Naming,
    Own,
    SaveName,
    clean,
    clean_exports,
    fault_of,
    naming_of,
    newest,
    open_given,
)
from difftrain.checkpoint.record import (
    Empty,
    Finished,
    Foreign,
    RunRecord,
    Unfinished,
    choose_start,
    inspect,
)
from difftrain.checkpoint.retain import retain_exports, retain_states

__all__ = [
    "DIFFUSERS",
    "STEPS",
    "Claim",
    "Empty",
    "Finished",
    "Foreign",
    "Manifest",
    "Naming",
    "Own",
    "RunRecord",
    "SaveFault",
    "SaveName",
    "Torn",
    "Unfinished",
    "choose_start",
    "claim_together",
    "clean",
    "clean_exports",
    "commit",
    "fault_of",
    "inspect",
    "load_meta",
    "naming_of",
    "newest",
    "open_given",
    "retain_exports",
    "retain_states",
    "verify",
]
