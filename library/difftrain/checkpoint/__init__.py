"""Checkpoints: whole or absent. The commit, finding the newest whole one, retention, and one run a folder."""

from difftrain.checkpoint.claim import Claim, claim_together
from difftrain.checkpoint.commit import SaveFault, commit
from difftrain.checkpoint.find import clean, clean_exports, fault_of, newest, open_given
from difftrain.checkpoint.manifest import Manifest, Torn, load_meta, verify
from difftrain.checkpoint.names import STEPS, Naming, SaveName, naming_of
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
    "STEPS",
    "Claim",
    "Empty",
    "Finished",
    "Foreign",
    "Manifest",
    "Naming",
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
