"""What is said where memory runs out: how much was in use for what, and which flags need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, TrainingFault
from difftrain.device.memory import CACHING, EVALUATING, SAMPLING, OutOfMemory, during, ran_out, requested_memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from difftrain.config import TrainConfig
    from difftrain.device import Device
    from difftrain.distributed.launch import Launch


def in_step(step: int, micro: list[Batch]) -> AbstractContextManager[None]:
    """Name a step, and the shape that did not fit, as far as that is known: the largest."""
    largest = max(micro, key=lambda b: len(b.record_id) * b.bucket.frames * b.bucket.height * b.bucket.width)
    return during(f"training (step {step}, {len(largest.record_id)} images of {largest.bucket})")


@contextmanager
def explained(cfg: TrainConfig, device: Device, launch: Launch) -> Iterator[None]:
    """Turn an allocation that failed into a sentence with its remedies. Raises TrainingFault."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory):
            shortage = error
        elif (where := ran_out(error)) is not None:
            shortage = OutOfMemory("setting up model and optimizer", requested_memory(error), where == "host")
        else:
            raise
        raise TrainingFault(sentence(shortage, cfg, device, launch)) from error


def sentence(shortage: OutOfMemory, cfg: TrainConfig, device: Device, launch: Launch) -> str:
    """Say who ran out of memory, doing what, what is in use, and what to change."""
    who = f"rank {launch.rank}: " if launch.distributed else ""
    more = f", {shortage.requested_memory} more were requested" if shortage.requested_memory else ""
    memory = None if shortage.on_host else device.memory()
    use = f" ({memory.sentence()})" if memory is not None else ""
    whose = "this machine" if shortage.on_host or memory is None else str(device.torch_device)
    ways = host_remedies(cfg) if shortage.on_host else remedies(cfg, launch, shortage.doing)
    return (
        f"{who}{whose} is out of memory while {shortage.doing}{more}{use}. What to try, the cheapest first: "
        f"{'; '.join(ways)}. Complete checkpoints remain valid: {option('save.resume')}=FOLDER continues from one with other flags"
    )


def host_remedies(cfg: TrainConfig) -> list[str]:
    """List what needs less memory of the machine."""
    ways = []
    if cfg.data.workers > 1:
        ways.append(f"{option('data.workers')}={cfg.data.workers // 2}")
    if cfg.cache.latents or cfg.cache.text:
        ways.append(
            f"features cached on disk ({option('cache.latents_to_disk', True)}, {option('cache.text_to_disk', True)})"
        )
    if cfg.cache.preload:
        ways.append(f"without {option('cache.preload', True)}")
    if cfg.training.cpu_offload_checkpointing:
        ways.append(f"without {option('training.cpu_offload_checkpointing', True)}")
    return [*ways, "fewer processes on this machine (--nproc_per_node)"]


def remedies(cfg: TrainConfig, launch: Launch, doing: str) -> list[str]:
    """List flags that need less of the device than this configuration, those that change no result first."""
    training, model, cache = cfg.training, cfg.model, cfg.cache
    if doing == CACHING:
        size = model.vae_batch_size or max(cfg.batch_sizes)
        ways = (
            [f"{option('model.vae_batch_size')}={size // 2}"]
            if size > 1
            else [f"a smaller {option('data.resolution')}"]
        )
        words = cache.batch_size if cache.text or cache.text_to_disk else 1
        return [*ways, f"{option('cache.batch_size')}={words // 2}"] if words > 1 else ways

    # what training itself does not need: drawing and evaluation
    ways = []
    if doing == SAMPLING:
        ways.append(f"smaller or fewer images in {option('sample.prompts')}")
    at_once = [cfg.eval.batch_size or dataset.batch_size for eval_set in cfg.eval.sets for dataset in eval_set.datasets]
    if doing in (EVALUATING, SAMPLING) and max(at_once, default=1) > 1:
        ways.append(f"--eval.batch_size={max(at_once) // 2} (of evaluation sets)")

    # much the same training, with less kept at once
    if not training.gradient_checkpointing:
        ways.append(option("training.gradient_checkpointing", True))
    if not (cache.latents or cache.latents_to_disk):
        ways.append(f"{option('cache.latents', True)} (the VAE stays off the device)")
    if not (model.train_text_encoder or cache.text or cache.text_to_disk):
        ways.append(f"{option('cache.text', True)} (the text encoders stay off the device)")
    if training.batch_size > 1 and len(cfg.batch_sizes) == 1:
        half, times = training.batch_size // 2, 2 * training.accumulation
        same = "the same images per step" if training.batch_size % 2 == 0 else "about the same images per step"
        if cfg.data.epoch_batches == "every":  # whose order is one of micro batches
            same = f"about as many images a step, in another order: a resume then takes {option('save.reset_dataloader', True)}"
        ways.append(f"{option('training.batch_size')}={half} {option('training.accumulation')}={times} ({same})")
    elif max(cfg.batch_sizes) > 1:
        ways.append("a smaller batch_size in the dataset's file")
    if launch.size > 1 and cfg.optimizer.type.lower() == "adamw":
        ways.append(f"{option('optimizer.type')}=oss (its state is sharded over the ranks)")
    moves = cfg.holds_base or (cfg.optimizer.fused_backward and not training.full_precision)
    if moves and training.engine == "native" and training.pipeline_stages == 1 and not training.compile:
        more = cfg.memory.swap_blocks + 4
        ways.append(
            f"{option('memory.swap_blocks')}={more} ({'more blocks' if more > 4 else 'blocks'} wait in host memory)"
        )
    if training.gradient_checkpointing and not training.cpu_offload_checkpointing:
        ways.append(option("training.cpu_offload_checkpointing", True))

    # from here on results may change
    if training.mixed_precision == "no" and training.full_precision is None:
        ways.append(f"{option('training.mixed_precision')}=bf16")
    if training.full_precision is None and training.mixed_precision != "fp16":
        ways.append(
            option("training.full_precision", "bf16")
            + ("" if training.mixed_precision == "bf16" else f" {option('training.mixed_precision')}=bf16")
        )
    if not cfg.optimizer.fused_backward and launch.size == 1 and cfg.optimizer.type.lower() == "adafactor":
        ways.append(option("optimizer.fused_backward", True))
    elif cfg.optimizer.type.lower() != "adafactor":
        ways.append(f"{option('optimizer.type')}=Adafactor")
    if model.train_text_encoder:
        ways.append(f"without {option('model.train_text_encoder', True)}")
    return [*ways, f"a smaller {option('data.resolution')}"]
