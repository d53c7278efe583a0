"""CLIP's two text encoders of a demo, fitted to its captions: their pooled vectors tell what a picture is like at large.

Real ones have learnt from hundreds of millions of pictures which words look alike; random ones know no word from
another. So the two are trained, before they are frozen, to say the leading principal components of the latents of the
picture that a caption belongs to, through a linear layer that is thrown away. Words are left out at random meanwhile:
each must tell something by itself, since those of new captions have not stood together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.vae.fit import principal
from difftrain.train.demo import recipe

if TYPE_CHECKING:
    from torch import Tensor

COMPONENTS, BATCH, RATE, WARM_UP, LEFT_OUT = 128, 128, 3e-3, 40, 0.15
NO_WORD = 1  # CLIP's id of a quotation mark, which no caption of a demo has
HELD_OUT = 256  # captions that only tell how well it went


def fit_text(
    encoders: Sequence[Any], ids: Sequence[Tensor], latents: Tensor, steps: int, say: Callable[[str], None]
) -> None:
    """Train CLIP encoders in place to tell latents from captions; say how much of their variance they tell of others.

    ids: of every encoder (N, L) int64. latents: (N, C, H, W), of the captions' pictures.
    """
    started, rng = time.monotonic(), torch.Generator().manual_seed(recipe.SEED)
    order = torch.randperm(len(latents), generator=rng)
    held = min(HELD_OUT, len(order) // 8)
    few, seen = order[:held], order[held:]
    x = latents.flatten(1).float()
    basis, _ = principal(x[..., None, None], min(COMPONENTS, *x.shape))
    wanted = (x - x.mean(0)) @ basis.T
    scale = wanted.std()
    with torch.no_grad():
        width = _said(encoders, [each[:1] for each in ids]).shape[1]
    head = torch.nn.Linear(width, wanted.shape[1])
    torch.nn.init.normal_(head.weight, std=head.in_features**-0.5, generator=rng)
    torch.nn.init.zeros_(head.bias)
    weights = [*head.parameters(), *(weight for encoder in encoders for weight in encoder.parameters())]
    asked = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(steps):
        rows = seen[torch.randint(len(seen), (BATCH,), generator=rng)]
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        said = _said(encoders, [_fewer(encoder.config, each[rows], rng) for encoder, each in zip(encoders, ids)])
        loss = (head(said) - wanted[rows] / scale).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for weight, before in zip(weights, asked):
        weight.requires_grad_(before)
    with torch.no_grad():
        left = (head(_said(encoders, [each[few] for each in ids])) * scale - wanted[few]).square().sum()
    told = 1 - float(left / (wanted[few] - wanted[seen].mean(0)).square().sum())
    say(
        f"text encoders fitted to them in {time.monotonic() - started:.0f} s: "
        f"{100 * told:.0f} % of what pictures differ in is told from captions that they have not seen"
    )


def _said(encoders: Sequence[Any], ids: Sequence[Tensor]) -> Tensor:
    outputs = [encoder(each) for encoder, each in zip(encoders, ids)]
    return torch.cat([out.text_embeds if "text_embeds" in out else out.pooler_output for out in outputs], dim=-1)


def _fewer(config: Any, ids: Tensor, rng: torch.Generator) -> Tensor:
    """Put a token that stands in no caption in the place of some."""
    marks = torch.tensor([config.bos_token_id, config.eos_token_id, config.pad_token_id])
    gone = (torch.rand(ids.shape, generator=rng) < LEFT_OUT) & ~torch.isin(ids, marks)
    return torch.where(gone, NO_WORD, ids)
