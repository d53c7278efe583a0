"""What `accelerate launch` says by variables of the environment: taken into the configuration, or refused by name.

Its launcher reads a file such as default_config.yaml and hands everything on as ACCELERATE_*; where ranks are started as
torchrun starts them, their places come as RANK, LOCAL_RANK and WORLD_SIZE, which are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from difftrain.config.layers import Layer
from difftrain.contracts.errors import Fault

_TRUE = ("1", "true", "yes", "on", "y", "t")
_PRECISION, _ACCUMULATION = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_COMPILE, _MODE = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"
_OURS = "set distributed_type to MULTI_GPU, MULTI_NPU or NO: each device has the whole model"
# switches that ask for what is not done -> what to use instead
_REFUSED = {
    "ACCELERATE_USE_FSDP": _OURS,
    "ACCELERATE_USE_DEEPSPEED": f"{_OURS}; [deepspeed] enable = true in a file of --config shards with DeepSpeed's ZeRO",
    "ACCELERATE_USE_MEGATRON_LM": _OURS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _OURS,
    "ACCELERATE_USE_SAGEMAKER": "start the script itself, or with torchrun",
}
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # what its launcher uses for several CPU processes
# switches that change nothing here
_IDLE = {
    "ACCELERATE_DEBUG_MODE": "checks accelerate's own collectives, which are not used",
    "ACCELERATE_CPU_AFFINITY": "binds processes to cores, which is left to the system",
    "ACCELERATE_DOWNCAST_BF16": "is for TPUs",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "is chosen for each block of the denoiser",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "is chosen for each block of the denoiser",
}


def layer_of(environ: Mapping[str, str]) -> Layer:
    """Read the variables as a layer of values, below the command line."""
    layer = Layer()

    def variable(name: str) -> str:
        return environ.get(name, "").strip()

    # --- precision, processor, accumulation
    if precision := variable(_PRECISION).lower():
        if precision in ("no", "fp16", "bf16"):
            layer.set("training.mixed_precision", precision, _PRECISION)
        else:
            layer.faults.append(Fault(_PRECISION, f"{precision} is not offered", "no, fp16 or bf16"))
    if variable("ACCELERATE_USE_CPU").lower() in _TRUE:
        layer.set("training.device", "cpu", "ACCELERATE_USE_CPU")
    if steps := variable(_ACCUMULATION):
        if steps.isdecimal() and int(steps):
            layer.set("training.accumulation", int(steps), _ACCUMULATION)
        else:
            layer.faults.append(Fault(_ACCUMULATION, f"must be a whole number from 1 up, got {steps!r}"))

    # --- compilation
    if (backend := variable(_COMPILE).lower()) not in ("", "no"):
        layer.set("training.compile", True, _COMPILE)
        layer.set("training.compile_backend", backend, _COMPILE)
        if (mode := variable(_MODE).lower()) not in ("", "default"):
            layer.faults.append(Fault(_MODE, f"{mode} is not offered", "default"))

    # --- what is refused, and what has no effect
    for name, remedy in _REFUSED.items():
        if variable(name).lower() in _TRUE:
            layer.faults.append(Fault(name, "is not offered", remedy))
    for name in _MPI:
        if variable(name) not in ("", "1") and not variable("WORLD_SIZE"):
            layer.faults.append(
                Fault(name, f"{variable(name)}: MPI ranks are not supported", "start them with torchrun")
            )
    for name, why in _IDLE.items():
        if variable(name).lower() in _TRUE:
            layer.notes.append(f"{name}: has no effect: it {why}")
    return layer
