"""What frozen encoders make of the first batch of a session: values that are no numbers would be trained, or skipped for ever.

Weights that are read are finite (models/weights/source.py), and an encoder can overflow all the same: in fp16, or with weights
that are large. A cache is checked entry by entry where it is built (cache/encoding.py); here it is who encodes in each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import CAPTION, Batch, Encoder, TrainingFault

if TYPE_CHECKING:
    from difftrain.train.state import Run


def check_encoders(run: Run, micro: list[Batch]) -> None:
    """Encode the first of this rank's micro batches once, and look at it. Every rank calls it. Raises TrainingFault on all.

    An encoder whose output the batch has from a cache is left out, as one that is trained.
    """
    batch = micro[0]
    names = [record.name for record in run.data.index.records(batch.record_id.tolist())]
    problems = [sentence for sentence in run.ranks.gather(_look(run, batch, names)) if sentence]
    if problems:
        raise TrainingFault(problems[0])


def _look(run: Run, batch: Batch, names: list[str]) -> str:
    encoders = run.model.family.encoders(run.model.parts)
    here = {name: encoder for name, encoder in encoders.items() if _encodes(encoder, batch)}
    if not here:
        return ""
    keyed = replace(batch, keys=batch.keys or tuple(str(number).encode() for number in batch.record_id.tolist()))
    moved = run.device.to_device(keyed)
    with torch.no_grad(), run.device.autocast(run.cfg.training.mixed_precision):
        for name, encoder in here.items():
            for feature, value in encoder.encode(moved).items():
                if not value.is_floating_point():
                    continue
                good = value.isfinite().flatten(1).all(dim=1).tolist()
                if bad := [record for record, is_good in zip(names, good, strict=True) if not is_good]:
                    return _sentence(name, feature, bad, len(names))
    return ""


def _encodes(encoder: Encoder, batch: Batch) -> bool:
    """Tell whether a step runs an encoder on this batch."""
    if any(name in batch.features for name in encoder.features):
        return False
    needed = encoder.inputs if encoder.source == CAPTION else (encoder.reads,)
    return any(name in batch.features for name in needed)  # a tokenizer leaves some out


def _sentence(encoder: str, feature: str, bad: list[str], count: int) -> str:
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    way = f"{option('model.vae_fp32', True)}, or " if encoder == "latents" else ""
    return (
        f"{encoder} makes values that are not finite (NaN, infinity) in {feature} of {len(bad)} of the first {count} samples: "
        f"{bad[0]}{more}. Nothing was trained: look at the weights of this encoder and at that sample; in fp16 it may "
        f"overflow ({way}bf16 instead)"
    )
