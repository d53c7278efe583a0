"""The options of train.py that are no keys."""

from __future__ import annotations

from typing import NamedTuple

LATEST = "latest"


class Option(NamedTuple):
    """One option. to: the field that it sets, to true or to its value. takes: the name of its value, [in brackets] if optional."""

    help: str
    to: str = ""
    takes: str = ""


OPTIONS: dict[str, Option] = {
    "config": Option("TOML file of the run", takes="FILE"),
    "dataset": Option("the same as --output.dataset", "data.dataset_config", "FILE"),
    "resume_from_checkpoint": Option(
        "go on from the newest whole checkpoint below output_dir, from the one of a step, or from a folder",
        "save.resume", "[FOLDER|STEP]"),
    "reset_dataloader": Option("a resume begins an epoch anew", "save.reset_dataloader"),
    "reset_optimizer": Option("a resume begins with a new optimizer and schedule", "save.reset_optimizer"),
    "reset_optimizer_params": Option(
        "a resume takes rate, decay and betas from the configuration", "save.reset_optimizer_params"),
    "cache_only": Option("build the cache, and stop", "cache.only"),
    "trust_cache": Option(
        "list, look at and hash no file of the data: index and cache are taken as they are; fingerprints of the encoders "
        "and checksums still count", "cache.trust"),
    "regenerate_cache": Option("encode everything that this run reads from its cache anew", "cache.regenerate"),
    "i_know_what_i_am_doing": Option(
        "two faults become warnings: the data changed since the checkpoint that a resume goes on from, and a larger share "
        "of the data than data.max_rejected_share is rejected", "training.only_warn"),
    "test_sample": Option(
        "draw the pictures of sample.prompts once, from the model as it stands or as it is resumed, and stop",
        "sample.test_only"),
    "dump_dataset": Option("write every sample of the first epoch, as training sees it, and stop", takes="DIR"),
    "dry_run": Option("print configuration, steps, memory and FLOP estimates; touch no device"),
    "deepspeed": Option("for command lines that have it: runs natively, and says so, unless --deepspeed_config shards"),
    "deepspeed_config": Option("DeepSpeed's JSON; with a zero stage of 1 to 3 the run is sharded by accelerate's plugin", takes="FILE"),
    "local_rank": Option("handed over by launchers; taken where the environment has no LOCAL_RANK", takes="N"),
    "master_port": Option("the same for MASTER_PORT", takes="N"),
}  # fmt: skip
