"""What a report says of a configuration in words: definitions, what is not enabled, and figures that others have published."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from difftrain.config.datasets.datasets import has_buckets, subsets_of
from difftrain.config.schema.families import family_titled, row_of, takes
from difftrain.config.spellings.spelling import option

if TYPE_CHECKING:
    from difftrain.config import TrainConfig


def network_of(cfg: TrainConfig) -> str:
    """Return what reports and logs call the network."""
    row = row_of(cfg)
    return row.networks_by_train_type.get(cfg.model.train_type, row.network)


LABEL = "published by others, not ours"


class Baseline(NamedTuple):
    """One published row, as its source states it."""

    source: str
    task: str
    figures: str
    family: str  # as [model] type spells it; "" of a model that is none of them


SDXL, SD3, FLUX = map(family_titled, ("SDXL", "SD3", "Flux.1"))
_MINDSPEED = 'MindSpeed-MM, 8 x Atlas 900 A2 / the GPU server "A"'

PUBLISHED: tuple[Baseline, ...] = (
    Baseline(
        "sd-scripts-xl, 2023-12", "SDXL fp16, batch 4, 8 devices", "20.2 FPS (A), 10.4 FPS (NPU-910); compute FPS", SDXL
    ),
    Baseline(_MINDSPEED, "SDXL train 1024 bf16 b4", "29.92 / 30.65 FPS", SDXL),
    Baseline(_MINDSPEED, "SDXL pretrain 1024 buckets bf16 b4", "19.79 / 21.14 FPS", SDXL),
    Baseline(_MINDSPEED, "SD3 full 512 bf16 b8", "26.24 / 28.33 FPS", SD3),
    Baseline(_MINDSPEED, "SD3 LoRA 512 fp16 b8", "47.93 / 47.95 FPS", SD3),
    Baseline(_MINDSPEED, "Flux.1 full 256 bf16 b16", "55.23 / 53.65 FPS", FLUX),
    Baseline("Mosaic, A100, cached latents, SD2 UNet", "256 px / 512 px per device", "137.5 / 36.3 img/s", ""),
    Baseline("Stability AI, SD3 2B MMDiT, H100", "resolution not stated", "37.2 img/s per device", SD3),
)


def published(family: str) -> list[Baseline]:
    """Return all rows, those about this family first: nothing else may be laid beside its figures."""
    return sorted(PUBLISHED, key=lambda row: row.family != family)


DEFINITIONS: dict[str, str] = {
    "step": "one update of the optimizer, over all ranks and accumulated micro batches",
    "global_batch": "images of one step: images a device takes at once x accumulation x devices; of several datasets, the largest",
    "step_loss": "loss of one step, the mean over all its images on all ranks, before the update",
    "avr_loss": "mean of step_loss over the last epoch's worth of steps (over all so far during the first epoch)",
    "final_loss": "step_loss of the last step with a finite loss",
    "loss_mean": "mean and standard deviation of step_loss over the last 100 recorded steps",
    "grad_norm": "norm of the whole gradient before clipping, after unscaling",
    "fps": "images per second over all devices, device synchronised, data wait included, warm-up and pauses "
    "(saving, sampling, evaluation) excluded",
    "compute_fps": "the same without the time that the reporting rank's device waited for data; the "
    "published Ascend figures are of this kind",
    "kernels": "what one step called (the first of the last session, on the reporting rank): attention fused or by torch's "
    "scaled_dot_product_attention, with the reasons; recomputed: again in the backward pass, as gradient "
    "checkpointing does; compiled blocks are not counted",
    "warm-up": "the first min(5, a third) steps of every session",
    "ips": "images per second per device: global batch / step seconds / devices, waiting included",
    "training_time_s": "seconds per step, waiting for data included",
    "timed_step_s": "seconds of one named step, waiting for data included; timed_step_ips: images per second and device of it",
    "all_steps_loss_mean": "mean and standard deviation of step_loss over all recorded steps",
    "e2e_training_time_s": "seconds from the start of the process to its report, summed over all sessions of the run: "
    "imports, loading, indexing, saving and lost work included; of a killed session up to its last metric line",
    "data_wait_s": "seconds per step that the device waited for data",
    "peak_memory_gib": "largest memory of one device that the allocator held for tensors; on a CPU the largest resident "
    "memory of the reporting process",
    "flops_per_sample": "model FLOPs of one image, forward and backward, recomputation not counted; a multiply-add is 2",
    "mfu": "model FLOPs per second and device / the vendor's dense peak of the dtype",
    "matmul_utilisation": "model FLOPs per second and device / the rate of a large matmul of the dtype, measured on this "
    "device at the end of the run",
    "quantile_losses": "loss on fixed images and noise at fixed quantiles of the timestep",
    "evaluation": "loss on evaluation sets at nine quantiles of the timestep (of a flow, of the time as it is sampled in "
    "training), with fixed noise, no dropout, centre crops and unchanged captions, by the raw weights and, "
    "as ema_..., by the averaged ones; the mean over all records, bit-identical on any number of ranks",
    "kid_efflite0": "unbiased squared kernel distance ((x.y/d + 1)^3) between features of generated images and of the held-out "
    "images whose captions they were generated for; features: the pooled last layer of EfficientNet-Lite0, so it is no FID "
    "and no KID by Inception, and compares with figures of this trainer only. Lower is better; sets of the same distribution give 0 on average, "
    "so it may be negative. The error is a standard error over disjoint blocks of images; ..._vae is the distance of the held-out "
    "images themselves after encoding and decoding: what the VAE alone costs",
}


def _of_family(cfg: TrainConfig) -> dict[str, bool]:
    """Return what only some models can have."""
    some = {
        "loss.min_snr_gamma": ("min-SNR weighting", bool(cfg.loss.min_snr_gamma)),
        "loss.text_recon_gamma": ("text reconstruction", cfg.loss.text_recon_gamma > 0),
        "model.enable_uncond_text_dropout": (
            "dropping the texts' encodings (unconditional zeros)", cfg.model.enable_uncond_text_dropout),
        "repa": ("alignment with an image encoder (REPA)", bool(cfg.repa.encoder)),
        "tread": ("token routing (TREAD)", cfg.tread.share > 0),
        "patch_masking": ("deferred patch masking", cfg.patch_masking.share > 0),
    }  # fmt: skip
    return dict(some[path] for path in some if takes(cfg, path))


def not_enabled(cfg: TrainConfig) -> list[str]:
    """Name what this run did without, so that nobody compares it with a run that had it."""
    training, cache = cfg.training, cfg.cache
    captions = [cfg.captions, *(subset.captions for subset in subsets_of(cfg))]
    off = {
        "mixed precision (everything is computed in fp32)": training.mixed_precision != "no",
        "gradient accumulation": training.accumulation > 1,
        "gradient checkpointing": training.gradient_checkpointing,
        "gradient clipping": training.max_grad_norm > 0,
        "torch.compile": training.compile,
        f"asking for a fused attention kernel ({option('training.fused_attention', True)})": training.fused_attention,
        "training of the text encoders": cfg.model.train_text_encoder,
        f"sharded optimizer state ({option('optimizer.type')}=oss)": cfg.optimizer.type.lower() == "oss",
        "averaged weights (EMA)": cfg.ema.enable or bool(cfg.ema.profiles),
        **_of_family(cfg),
        "evaluation on held-out records": cfg.validation.split > 0 or bool(cfg.eval.sets),
        "aspect buckets": has_buckets(cfg),
        "caption dropout": any(section.dropout_rate > 0 or section.dropout_every_n_epochs > 0 for section in captions),
        "cached latents (they are computed online)": cache.latents or cache.latents_to_disk,
        "cached text features (they are computed online)": cache.text or cache.text_to_disk,
        "samples during training": bool(cfg.sample.every_n_steps or cfg.sample.every_n_epochs),
    }
    return [name for name, enabled in off.items() if not enabled]
