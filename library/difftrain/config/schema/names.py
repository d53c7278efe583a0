"""Names that other rooms know how to build, so that a misspelt one is a fault before torch is imported.

Tests hold these lists against the registries of the rooms.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EIGHT_BIT = (
    "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "Lion8bit", "PagedLion8bit", "SGDNesterov8bit",
)  # fmt: skip
D_ADAPTATION = (
    "DAdaptation", "DAdaptAdamPreprint", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptAdanIP", "DAdaptLion",
    "DAdaptSGD",
)  # fmt: skip
ADAPTIVE = (*D_ADAPTATION, "Prodigy")  # they estimate the rate: --learning_rate is a factor of it
FIRST_RATE = ("DAdaptAdaGrad", "DAdaptAdan", "DAdaptAdanIP")  # of these, those that look at the first group's rate only
SCHEDULE_FREE = ("RAdamScheduleFree", "AdamWScheduleFree", "SGDScheduleFree")
ASCEND = ("NpuFusedAdamW",)
KAHAN = ("AdamW8bitKahan",)
OURS = ("Muon", "GenericOptim", "Automagic", *KAHAN)  # kohya's scripts have all others
OPTIMIZERS = (
    "AdamW", "oss", "Lion", "SGDNesterov", "Adafactor", *EIGHT_BIT, *ADAPTIVE, *SCHEDULE_FREE, *ASCEND, *OURS,
)  # fmt: skip
# torch.optim's own, without a dotted path as in kohya's scripts; what needs the loss again or sparse gradients is not here
TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
# each weight from its own gradient and state alone, so that it can be updated while others still wait for theirs
UPDATED_ALONE = tuple(
    name for name in (*OPTIMIZERS, *TORCH_OPTIMIZERS) if name not in ("oss", *ADAPTIVE, *SCHEDULE_FREE, *ASCEND)
)
# of other trainers: known and not built yet -> what to take; and those that mean one of ours -> it, and why
OPTIMIZERS_LATER = {
    "stableadamw": "AdamW", "came": "Adafactor", "offload": "AdamW8bit",
}  # fmt: skip
OPTIMIZERS_NEAR = {
    "adamw_optimi": ("AdamW", "on fp32 weights, which need no summation of Kahan's (master_weights = 'kahan' has that)"),
}  # fmt: skip
# optimizer -> (module, what pip calls it)
PACKAGES = (
    {name: ("bitsandbytes", "bitsandbytes") for name in (*EIGHT_BIT, *KAHAN)}
    | {name: ("dadaptation", "dadaptation") for name in D_ADAPTATION}
    | {name: ("schedulefree", "schedulefree") for name in SCHEDULE_FREE}
    | {"Lion": ("lion_pytorch", "lion-pytorch"), "Prodigy": ("prodigyopt", "prodigyopt")}
    | {name: ("torch_npu", "torch_npu") for name in ASCEND}
)

SCHEDULERS = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay", "piecewise_constant", "adafactor",
)  # fmt: skip

CACHE_DTYPES = ("fp32", "bf16", "fp16", "fp8")

SAMPLERS = (
    "ddim", "pndm", "lms", "euler", "euler_a", "heun", "dpm_2", "dpm_2_a", "dpmsolver", "dpmsolver++", "dpmsingle",
    "k_lms", "k_euler", "k_euler_a", "k_dpm_2", "k_dpm_2_a",
)  # fmt: skip

FLOW_SAMPLERS = ("flow_euler", "flow_heun")

COMPILE_BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs", "tvm", "openxla")
COMPILE_BACKENDS_GONE = ("aot_ts_nvfuser", "nvprims_nvfuser", "ofi", "fx2trt", "onnxrt", "tensort", "ipex")


def proper(word: str, names: Iterable[str]) -> str:
    """Return the known name that a word spells in whatever case, or an empty string."""
    return next((name for name in names if name.lower() == word.lower()), "")


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the known name most like a misspelt one, or an empty string."""
    known = {name.lower(): name for name in names}
    # a name that was begun is meant before one that is as long: AdamW8 is AdamW8bit, not AdamW
    begun = [name for name in known if len(word) > 3 and name.startswith(word.lower())]
    matches = begun if len(begun) == 1 else get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return known[matches[0]] if matches else ""


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """Return "did you mean X?" or an empty string."""
    match = nearest(word, names)
    return f"did you mean {prefix}{match}?" if match else ""


# schedules of a pipeline -> pieces of the model that a device has: of two, it waits less for the devices before it
PIECES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb": 2}
# how blocks are dealt to its stages
BY_PARAMETERS, EVENLY, BY_KIND, BY_HAND = "parameters", "uniform", "type:", "manual"
