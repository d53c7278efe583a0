"""Checkpoints: complete or absent.

The way of a save:
 1. claim.py        one run an output folder
 2. tensor_files.py each rank's tensors in files, complete or in pieces, and back for any number of ranks
 3. commit.py       all ranks write aside, a manifest seals the files, the folder gets its name
 4. find.py         names of saves, and the newest complete one to resume; what a dead run left is cleaned up
    compatibility.py   whether it is of this model and this optimizer
 5. record.py       run.json: which run a folder belongs to, and what may be done with it
 6. retain.py       how many saves are kept
"""

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
