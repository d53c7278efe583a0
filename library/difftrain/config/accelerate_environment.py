"""What `accelerate launch` says by variables of the environment: taken into the configuration, or refused by name.

Its launcher reads a file such as default_config.yaml and hands everything on as ACCELERATE_* and FSDP_*; where ranks are
started as torchrun starts them, their places come as RANK, LOCAL_RANK and WORLD_SIZE, which are read elsewhere. The entry
point that is diffusers' own example takes all of it; the others take what FSDP is to do (fsdp_layer), and flags say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from difftrain.config.layers import Layer
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import Fault

_TRUE = ("1", "true", "yes", "on", "y", "t")
_PRECISION, _ACCUMULATION = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_COMPILE, _MODE = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"
_OURS = "set distributed_type to MULTI_GPU, MULTI_NPU or NO: each device has the whole model; FSDP shards it"
# switches that ask for what is not done -> what to use instead
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": f"{_OURS}; [deepspeed] enable = true in a file of --config shards with DeepSpeed's ZeRO",
    "ACCELERATE_USE_MEGATRON_LM": _OURS,
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
    _fsdp(layer, environ)
    return layer


def fsdp_layer(environ: Mapping[str, str]) -> Layer:
    """Read what the variables say of FSDP alone: the engine and its sharding, below the command line."""
    layer = Layer()
    _fsdp(layer, environ)
    return layer


# ------------------------------------------------------------------ FSDP: accelerate's plugin -> engine = fsdp

_FSDP, _PARALLEL = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
_SIZES = "PARALLELISM_CONFIG_"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # its numbers, from 1
# what changes no number of a run -> how it is done here
_IDLE_FSDP = {
    **dict.fromkeys(
        ("FSDP_AUTO_WRAP_POLICY", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_MIN_NUM_PARAMS"),
        "each block of the model is sharded by itself",
    ),
    **dict.fromkeys(("FSDP_BACKWARD_PREFETCH", "FSDP_FORWARD_PREFETCH"), "FSDP2 chooses what it gathers ahead"),
    "FSDP_USE_ORIG_PARAMS": "FSDP2 keeps every parameter as it is",
    "FSDP_SYNC_MODULE_STATES": "every rank reads the same weights",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "every rank reads the same weights, one tensor at a time",
    "FSDP_STATE_DICT_TYPE": "checkpoints are written in pieces, which load on any number of ranks",
}
_READ_FSDP = (
    "FSDP_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD", "FSDP_OFFLOAD_PARAMS",
    "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "FSDP_IGNORED_MODULES",
)  # fmt: skip


def _fsdp(layer: Layer, environ: Mapping[str, str]) -> None:
    """Map its FSDP plugin onto the fsdp engine; what has no counterpart there is refused by name."""

    def variable(name: str) -> str:
        value = environ.get(name, "").strip()
        return "" if value.lower() == "none" else value

    def is_on(name: str) -> bool:
        return variable(name).lower() in _TRUE

    def refuse(name: str, what: str, remedy: str = "") -> None:
        layer.faults.append(Fault(name, what, remedy))

    if not is_on(_FSDP):
        if is_on(_PARALLEL):
            refuse(_PARALLEL, "is not offered without FSDP", _OURS)
        return

    # --- engine and shards: version 1 names a strategy, version 2 whether weights are resharded
    version = variable("FSDP_VERSION") or "1"
    reshard = variable("FSDP_RESHARD_AFTER_FORWARD")
    if version == "1":
        name = "FSDP_SHARDING_STRATEGY" if variable("FSDP_SHARDING_STRATEGY") else "FSDP_RESHARD_AFTER_FORWARD"
        text = variable(name).upper() or _STRATEGIES[0]
        strategy = _STRATEGIES[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text
        if strategy == "NO_SHARD":
            layer.set("training.engine", "native", name)
            return
        if strategy not in _STRATEGIES:
            refuse(name, f"{variable(name)} is not known", f"one of {', '.join(_STRATEGIES)}")
        layer.notes.append(f"{_FSDP}: FSDP_VERSION 1 runs as FSDP2: {option('training.engine', 'fsdp')}")
        hybrid, keeps = strategy.startswith("HYBRID"), strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    else:
        name, hybrid, keeps = "FSDP_RESHARD_AFTER_FORWARD", False, reshard.lower() in ("false", "0", "no")
        if version != "2":
            refuse("FSDP_VERSION", f"must be 1 or 2, got {version!r}")
        if reshard.lower() not in ("", "false", "0", "no", *_TRUE):
            refuse(name, f"{reshard} is not offered with FSDP_VERSION 2", "true or false")
    layer.set("training.engine", "fsdp", _FSDP)
    if keeps:
        layer.set("fsdp.reshard_after_forward", "never", name)

    # --- which ranks share a copy: all, those of a machine, or as many as the parallelism configuration says
    sizes = {size: variable(f"{_SIZES}{size}_SIZE") or "1" for size in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")}
    if is_on(_PARALLEL):
        for size, text in sizes.items():
            if not text.isdecimal() or not int(text):
                refuse(f"{_SIZES}{size}_SIZE", f"must be a whole number from 1 up, got {text!r}")
            elif int(text) > 1 and size in ("TP", "CP", "SP"):
                refuse(f"{_SIZES}{size}_SIZE", f"{text} has no counterpart here", "1: only data are parallel")
        replicas, share = sizes["DP_REPLICATE"], sizes["DP_SHARD"]
        if replicas.isdecimal() and share.isdecimal() and int(replicas) > 1 and int(share):
            layer.set("fsdp.shard", "hybrid", f"{_SIZES}DP_REPLICATE_SIZE")
            layer.set("fsdp.shard_size", int(share), f"{_SIZES}DP_SHARD_SIZE")
    elif hybrid:
        layer.set("fsdp.shard", "hybrid", name)
    layer.values.setdefault("fsdp.shard", "full")
    layer.origins.setdefault("fsdp.shard", _FSDP)

    # --- memory
    if is_on("FSDP_OFFLOAD_PARAMS"):
        layer.set("fsdp.cpu_offload", True, "FSDP_OFFLOAD_PARAMS")
    if is_on("FSDP_ACTIVATION_CHECKPOINTING"):
        layer.set("training.gradient_checkpointing", True, "FSDP_ACTIVATION_CHECKPOINTING")
    if is_on("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        if is_on("FSDP_ACTIVATION_CHECKPOINTING"):
            layer.set("training.cpu_offload_checkpointing", True, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
        else:
            refuse("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "needs FSDP_ACTIVATION_CHECKPOINTING=true")

    # --- what has no counterpart, and what has no effect
    if ignored := variable("FSDP_IGNORED_MODULES"):
        refuse(
            "FSDP_IGNORED_MODULES", f"{ignored} has no counterpart here", "leave it out: all trained parts are sharded"
        )
    for other in sorted(name for name in environ if name.startswith("FSDP_") and variable(name)):
        if other in _IDLE_FSDP:
            if variable(other).lower() not in ("false", "0", "no_prefetch", "sharded_state_dict"):
                layer.notes.append(f"{other}: has no effect: {_IDLE_FSDP[other]}")
        elif other not in _READ_FSDP:
            refuse(other, "is not known", f"known are {', '.join((*_READ_FSDP, *_IDLE_FSDP))}")
