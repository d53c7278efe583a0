"""A training step of SDXL as one writes it by hand from torch and diffusers: what ours is measured against.

It shares nothing with difftrain but the batches and the first weights, so equal losses prove both right.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.models.attention_processor import AttnProcessor2_0

if TYPE_CHECKING:
    from difftrain.contracts import Batch, Parts


class PlainSDXL:
    """Hold copies of a model's parts and train the UNet: AdamW, constant rate, epsilon prediction."""

    def __init__(self, parts: Parts, device: torch.device, *, lr: float, dtype: torch.dtype | None = None) -> None:
        """Copy. dtype: of autocast; None computes in fp32."""
        self.device, self.dtype = device, dtype
        self.unet = copy.deepcopy(parts.root.unet).to(device).train()
        self.unet.set_attn_processor(AttnProcessor2_0())
        frozen = {name: copy.deepcopy(part).to(device).eval() for name, part in parts.frozen.items()}
        self.vae, self.first, self.second = (frozen.get(n) for n in ("vae", "text_encoder_1", "text_encoder_2"))
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=lr, fused=True)
        self.scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    def step(self, micro: list[Batch]) -> float:
        """Make one update and return its loss."""
        total = 0.0
        for batch in micro:
            loss = self.loss(batch) / len(micro)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean squared error of the predicted noise."""
        with torch.no_grad():
            latents = self.latents(batch)
            hidden, pooled = self.text(batch)
            noise, timestep = batch.draws["noise"].to(self.device), batch.draws["timestep"].to(self.device)
            noisy = self.scheduler.add_noise(latents, noise, timestep)
            sizes = [batch.features[name] for name in ("original_size", "crop_top_left", "target_size")]
            added = {"text_embeds": pooled, "time_ids": torch.cat(sizes, dim=1).float().to(self.device)}
        with self.autocast():
            predicted = self.unet(noisy, timestep, hidden, added_cond_kwargs=added).sample
        return F.mse_loss(predicted.float(), noise)

    def latents(self, batch: Batch) -> torch.Tensor:
        """Encode pictures, or take latents where the batch brings them."""
        if "latents" in batch.features:
            return batch.features["latents"].to(self.device)
        pixels = batch.features["pixels"].to(self.device).float() / 127.5 - 1
        spread = self.vae.encode(pixels).latent_dist
        return (spread.mean + spread.std * batch.draws["moments"].to(self.device)) * self.vae.config.scaling_factor

    def text(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode captions, or take their states where the batch brings them."""
        if "hidden" in batch.features:
            return batch.features["hidden"].to(self.device), batch.features["pooled"].to(self.device)
        with self.autocast():
            first = self.first(batch.features["input_ids_1"][:, 0].to(self.device), output_hidden_states=True)
            second = self.second(batch.features["input_ids_2"][:, 0].to(self.device), output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of mixed precision."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
