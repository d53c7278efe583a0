"""Names that other rooms know how to build, so that a misspelt one is a fault before torch is imported.

Tests hold these lists against the registries of the rooms.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

INIT_CONFIGS = ("base", "tiny", "demo")

OPTIMIZERS = ("AdamW", "oss")
OPTIMIZERS_LATER = (
    "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "Lion", "Lion8bit", "PagedLion8bit",
    "SGDNesterov", "SGDNesterov8bit", "DAdaptation", "DAdaptAdamPreprint", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan",
    "DAdaptAdanIP", "DAdaptLion", "DAdaptSGD", "Prodigy", "Adafactor", "RAdamScheduleFree", "AdamWScheduleFree",
    "SGDScheduleFree",
)  # fmt: skip

SCHEDULERS = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay", "piecewise_constant",
)  # fmt: skip
SCHEDULERS_LATER = ("adafactor",)

SAMPLERS = (
    "ddim", "pndm", "lms", "euler", "euler_a", "heun", "dpm_2", "dpm_2_a", "dpmsolver", "dpmsolver++", "dpmsingle",
    "k_lms", "k_euler", "k_euler_a", "k_dpm_2", "k_dpm_2_a",
)  # fmt: skip

COMPILE_BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs", "tvm", "openxla")
COMPILE_BACKENDS_GONE = ("aot_ts_nvfuser", "nvprims_nvfuser", "ofi", "fx2trt", "onnxrt", "tensort", "ipex")


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the known name most like a misspelt one, or an empty string."""
    known = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return known[found[0]] if found else ""


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """Return "did you mean X?" or an empty string."""
    found = nearest(word, names)
    return f"did you mean {prefix}{found}?" if found else ""
