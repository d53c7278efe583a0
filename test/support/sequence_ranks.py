"""Ranks that run passes with shared tokens and without: every family that can share them, in one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import difftrain
from difftrain.models.registry import FAMILIES

ABLE = tuple(name for name, row in FAMILIES.items() if row.has("training.sequence_parallel"))
SIZES = Path(difftrain.__file__).parent / "models" / "sizes_shipped"


def passes_of_all(folder: str) -> None:
    """Run every family's tiny network forward and backward, alone and with others; print the largest differences."""
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks

    launch = Launch.from_environment()
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), 1.0) as ranks:
        print(json.dumps({name: _differences(name, Path(folder), ranks) for name in ABLE}))


def _differences(name: str, folder: Path, ranks: Any) -> dict[str, float]:

    from difftrain.config import TrainConfig
    from difftrain.contracts import Bucket
    from difftrain.device import choose
    from difftrain.device.attention_modules import share_tokens, use_attention
    from difftrain.device.sequence import TokenShare, sharing
    from difftrain.models.registry import make_family
    from difftrain.testing.batches import cached_batch

    sizes = json.loads((SIZES / f"{name}.tiny.json").read_text())
    width = sizes["transformer"]["num_attention_heads"] * sizes["transformer"]["attention_head_dim"]
    sizes["transformer"] |= {"num_attention_heads": 2, "attention_head_dim": width // 2}
    path = folder / f"{name}-{ranks.rank}.json"
    path.write_text(json.dumps(sizes))
    cfg = TrainConfig.model_validate({
        "model": {"family": name, "init_from_config": str(path)},
        "training": {"seed": 1, "sequence_parallel": 2, "gradient_checkpointing": True},
    })  # fmt: skip
    family: Any = make_family(cfg)
    parts = family.load()
    parts.fill_root()
    use_attention(parts.root, choose("cpu", 0, 1))
    unit = family.features.size_multiple
    batch = cached_batch(family, Bucket(unit, 3 * unit, 9), 2)  # an odd number of tokens a frame
    inputs = family.inputs(batch, parts)

    def run(share: Any) -> tuple[Any, dict[str, Any]]:
        parts.root.zero_grad()
        with sharing(share):
            output = family.forward(parts.root, inputs)[0]
            loss = (output.float() ** 2).mean()
            (loss / (1 if share is None else share.size)).backward()
        return output.detach(), {n: p.grad.clone() for n, p in parts.root.named_parameters() if p.grad is not None}

    share = TokenShare.among(2, ranks.rank, ranks.size, None)
    assert share is not None
    sentence = share_tokens(parts.root, share, family.sequence)
    alone, together = run(None), run(share)
    assert "2 ranks" in sentence and share.exchanges and share.lengths[0] != 0
    assert alone[1].keys() == together[1].keys() and len(alone[1]) > 10
    of_all = {n: ranks.sum_(gradient) for n, gradient in together[1].items()}
    scale = max(float(gradient.abs().max()) for gradient in alone[1].values())
    return {
        "output": float((alone[0] - together[0]).abs().max() / alone[0].abs().max()),
        "gradients": max(float((of_all[n] - alone[1][n]).abs().max()) for n in of_all) / scale,
        "shares": len(set(share.lengths)),
    }
