"""DeepSpeed's JSON as literal tables: what each key sets, what changes nothing here, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH, _ACCUMULATION, _STAGE = "training.batch_size", "training.accumulation", "deepspeed.zero_stage"

# --- what a key sets: {key: field}
TOP = {
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_clipping": "training.max_grad_norm",
}
ZERO = {
    "stage": _STAGE,
    "stage3_gather_16bit_weights_on_model_save": "deepspeed.zero3_save_16bit",
    "stage3_gather_fp16_weights_on_model_save": "deepspeed.zero3_save_16bit",
}

# --- what changes no number of a run: buffers, buckets, logs. Said once where it is given
BUCKETS = "no effect: accelerate's plugin chooses it"
TUNING = dict.fromkeys((
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "reduce_bucket_size",
    "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential", "round_robin_gradients", "memory_efficient_linear", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "cpu_offload_use_pin_memory", "parameter_alignment",
), BUCKETS)  # fmt: skip
OFFLOAD_TUNING = dict.fromkeys((
    "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init",
    "cpuadam_cores_perc",
), BUCKETS)  # fmt: skip
_SCALE = "no effect: the loss scale starts at the device's, halves at an overflow and doubles after 2000 steps without"
FP16_TUNING = {
    **dict.fromkeys(
        ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"), _SCALE
    ),
    "auto_cast": "no effect: autocast decides which operations compute in half precision",
}
BF16_TUNING = {
    "immediate_grad_update": "no effect: gradients are the engine's",
    "check_grad_overflow": "no effect: gradients that are not finite are never applied",
}
_LOGGED = "no effect: metrics, trace and reports are this package's (docs/trackers.md, docs/trace.md)"
TOP_TUNING = {
    **dict.fromkeys((
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "tensorboard",
        "wandb", "csv_monitor", "comet", "timers", "log_level",
    ), _LOGGED),
    "activation_checkpointing": "no effect: DeepSpeed's checkpoint function is not used",
    "aio": "no effect: DeepSpeed's own figures are used",
    "zero_allow_untested_optimizer": "no effect: which optimizers work is checked here",
    "zero_force_ds_cpu_optimizer": "no effect: which optimizers work is checked here",
    "checkpoint": "no effect: checkpoints are this package's",
    "dataloader_drop_last": "no effect: the plan of the data is this package's",
    "disable_python_gc": "no effect",
}  # fmt: skip

# --- what is another way to train: {key: the value that asks for nothing}; any other is refused
OFF: Mapping[str, tuple[Any, ...]] = {
    "sparse_gradients": (False,), "prescale_gradients": (False,), "gradient_predivide_factor": (1, 1.0),
    "gradient_allreduce_op": ("mean",), "communication_data_type": (None, "fp32"), "disable_allgather": (False,),
    "seq_parallel_communication_data_type": ("fp32",), "sequence_parallel_size": (1,),
    "use_data_before_expert_parallelism": (False,), "managed_gradient_accumulation": (True,),
    "data_types": ({}, {"grad_accum_dtype": None}, {"grad_accum_dtype": "fp32"}),
    "amp": ({"enabled": False},), "torch_autocast": ({"enabled": False},), "autotuning": ({"enabled": False},),
    "elasticity": ({"enabled": False},), "data_efficiency": ({"enabled": False},), "compile": ({"enabled": False},),
    "curriculum_learning": ({"enabled": False},), "progressive_layer_drop": ({"enabled": False},),
    "eigenvalue": ({"enabled": False},), "quantize_training": ({"enabled": False},), "nebula": ({"enabled": False},),
    "hybrid_engine": ({"enabled": False},), "compression_training": ({},), "sparse_attention": ({},),
    "pipeline": ({},), "tensor_parallel": ({}, {"autotp_size": 0}, {"autotp_size": 1}), "zero_quantized_weights": (),
}  # fmt: skip
ZERO_OFF: Mapping[str, tuple[Any, ...]] = {
    "zero_hpz_partition_size": (0, 1), "zero_quantized_weights": (False,), "zero_quantized_gradients": (False,),
    "zero_quantized_nontrainable_weights": (False,), "mics_shard_size": (-1,),
    "mics_hierarchical_params_gather": (False,), "elastic_checkpoint": (False,), "load_from_fp32_weights": (True,),
    "ignore_unused_parameters": (True,), "legacy_stage1": (False,), "pipeline_loading_checkpoint": (False,),
    "compute_grad_norm": (True,), "save_muon_momentum_buffer_in_memory": (False,), "zenflow": (None,),
    "leaf_module": ({},), "cpu_offload": (False, None), "cpu_offload_param": (False, None),
}  # fmt: skip
OFFLOAD_OFF: Mapping[str, tuple[Any, ...]] = {"ratio": (1, 1.0), "super_offload": (False,)}
FP16_OFF: Mapping[str, tuple[Any, ...]] = {"loss_scale": (0, 0.0, None)}
BF16_OFF: Mapping[str, tuple[Any, ...]] = {
    "bf16_master_weights_and_grads": (False,), "bf16_optimizer_states": (False,),
}  # fmt: skip
INSTEAD = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}, its spelling of today',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}, its spelling of today',
    "loss_scale": "0: a scale that follows overflows",
    "pipeline": "pipeline_stages in the run's configuration",
    "compile": "compile in the run's configuration",
    "elasticity": "any number of processes continues a run here (docs/resume.md)",
    "tensor_parallel": "ZeRO, or the fsdp engine",
}

# --- optimizer and scheduler
ADAM = ("adam", "adamw")
OPTIMIZERS = {"lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD", "rmsprop": "RMSprop", "adamax": "Adamax",
               "nadam": "NAdam", "radam": "RAdam", "adadelta": "Adadelta", "asgd": "ASGD", "rprop": "Rprop"}  # fmt: skip
ADAM_RATE = 1e-3  # DeepSpeed's default, of all that it builds itself
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
SCHEDULER_KEYS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps"),
}
NAMED = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
DEFAULT_WARMUP, DEFAULT_FLOOR = 1000, 1e-4
