"""Training steps as others write them, over the very batches of the engine: what its speed and its losses are held to.

plain: diffusers' own forward, torch's AdamW, fused, as one writes it by hand. kohya: what sd-scripts' step does over cached
fp32 latents with torch's attention: a loss for each sample, AdamW as torch chooses it, item() at every step. graphs: the
plain step recorded once as a CUDA graph and played again. Nothing of the trainer's engine, objective or pass is used: of
the library come the batch, the first weights, and how cached states of text encoders are laid side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workload import LR, Case, Model, free

from difftrain.contracts import Batch, Parts
from difftrain.testing.batches import cached_batch

STYLES = {
    "plain": "plain diffusers + torch",
    "kohya": "what kohya's script does",
    "graphs": "plain, as a CUDA graph",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Forward = Callable[[Any, Tensor, Tensor, dict[str, Tensor]], Tensor]


# --- the calls of diffusers' own forwards, by class


def _unet(net: Any, x: Tensor, t: Tensor, told: dict[str, Tensor]) -> Tensor:
    names = [name for name in ("hidden_1", "hidden_2", "tokens") if name in told]
    hidden = torch.cat([told[name] for name in names], dim=-1)
    added = {"text_embeds": told["pooled"], "time_ids": told["time_ids"]} if "time_ids" in told else None
    return net(x, t, hidden, added_cond_kwargs=added, return_dict=False)[0]


def _sd3(net: Any, x: Tensor, t: Tensor, told: dict[str, Tensor]) -> Tensor:
    return net(
        hidden_states=x,
        encoder_hidden_states=told["tokens"],
        pooled_projections=told["pooled"],
        timestep=t,
        return_dict=False,
    )[0]


def _flux(net: Any, x: Tensor, t: Tensor, told: dict[str, Tensor]) -> Tensor:
    from diffusers import FluxPipeline

    height, width = x.shape[-2:]
    tokens = told["tokens"]
    out = net(
        hidden_states=FluxPipeline._pack_latents(x, *x.shape),
        timestep=t / 1000,
        guidance=told.get("guidance"),
        pooled_projections=told["pooled"],
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3, device=x.device),
        img_ids=FluxPipeline._prepare_latent_image_ids(len(x), height // 2, width // 2, x.device, x.dtype),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)


FORWARDS: dict[str, Forward] = {
    "UNet2DConditionModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}


class NoSuchStep(RuntimeError):
    """Say why a device, or this file, has no step of a style: that is no fault of a run."""


class PlainLoop:
    """A hand-written step over a model of its own. Raises NoSuchStep where the device, or this file, has no such step."""

    def __init__(self, case: Case, model: Model, style: str = "plain") -> None:
        self.case, self.model, self.style, self.device = case, model, style, model.device
        self.family, self.parts, self.notes = model.family(case), Parts(model.root), [STYLES[style]]
        self.net = model.root.denoiser.train()
        kind = type(self.net).__name__
        if kind not in FORWARDS:
            raise NoSuchStep(f"nobody has written a plain loop for {kind}")
        self.forward = FORWARDS[kind]
        if hasattr(self.net, "set_attn_processor") and kind.startswith("UNet"):
            from diffusers.models.attention_processor import AttnProcessor2_0

            self.net.set_attn_processor(AttnProcessor2_0())
        if case.checkpointing:
            self.net.enable_gradient_checkpointing()
        self.trained = [param for param in self.net.parameters() if param.requires_grad]
        made: dict[str, Any] = {"fused": True} if style != "kohya" else {}
        if style == "graphs":
            if not hasattr(self.device.module, "CUDAGraph"):
                raise NoSuchStep("this device records no graphs")
            if case.precision == "fp16":
                raise NoSuchStep("a loss scale is looked at by the host: a graph cannot hold it")
            made["capturable"] = True
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, **made)
        self.scaler = torch.amp.GradScaler(self.device.kind, enabled=case.precision == "fp16")
        self.scheduler = None
        if self.family.row.objective == "ddpm":  # the trained one: samplers noise by other rules
            from diffusers import DDPMScheduler

            self.scheduler = DDPMScheduler.from_config(self.family.scheduler().config)
        self._graph: Any = None
        self._held: list[Tensor] = []
        self._loss: Tensor | None = None

    def batch(self, seed: int) -> Batch:
        """Make a batch, the same for a seed."""
        return cached_batch(self.family, self.case.bucket, self.case.batch_size, seed=seed)

    def step(self, batch: Batch) -> Tensor:
        """Make one update; return its loss."""
        if self.style == "graphs":
            return self._play(batch)
        inputs = self.inputs(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(*inputs)
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.style == "kohya":
            loss.item()  # for the mean in its progress bar
        return loss

    def loss(self, batch: Batch) -> float:
        """Make one update; return its loss as a number."""
        return float(self.step(batch))

    @torch.no_grad()
    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return (noised latents, timestep, target, conditions) on the device."""
        moved = self.device.to_device(batch)
        mean, std = moved.features["moments"].chunk(2, dim=1)
        config = self.family.source.complete("vae")
        raw = mean + std * moved.draws["moments"]
        latents = (raw - (config.get("shift_factor") or 0.0)) * config.get("scaling_factor", 1.0)
        noise, t = moved.draws["noise"], moved.draws["timestep"]
        told = self.family.text(moved, self.parts)
        if getattr(self.net.config, "guidance_embeds", False):
            told["guidance"] = torch.full_like(t, self.family.cfg.model.guidance)
        if self.scheduler is not None:
            return self.scheduler.add_noise(latents, noise, t), t, noise, told
        share = t.view(-1, 1, 1, 1)
        return (1 - share) * latents + share * noise, 1000 * t, noise - latents, told

    def backward(self, x: Tensor, t: Tensor, target: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Predict, compare, and fill the gradients; return the loss."""
        dtype = _DTYPES.get(self.case.precision)
        cast = torch.autocast(self.device.kind, dtype=dtype, cache_enabled=self.style != "graphs")
        with cast if dtype else contextlib.nullcontext():
            predicted = self.forward(self.net, x, t, told)
        if self.style == "kohya":
            loss = F.mse_loss(predicted.float(), target, reduction="none").mean([1, 2, 3]).mean()
        else:
            loss = F.mse_loss(predicted.float(), target)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _play(self, batch: Batch) -> Tensor:
        """Record the step at the first call, then put the batch where the graph reads, and play it."""
        x, t, target, told = self.inputs(batch)
        fresh = [x, t, target, *told.values()]
        if self._graph is None:
            self._held = [each.clone() for each in fresh]
            names, module = list(told), self.device.module
            read = (*self._held[:3], dict(zip(names, self._held[3:], strict=True)))
            aside = module.Stream()
            aside.wait_stream(module.current_stream())
            with module.stream(aside):  # kernels are chosen, the optimizer's state is made
                for _ in range(3):
                    self._record(*read)
            module.current_stream().wait_stream(aside)
            self.optimizer.zero_grad(set_to_none=True)
            self._graph = module.CUDAGraph()
            with module.graph(self._graph):
                self._loss = self._record(*read)
        for held, each in zip(self._held, fresh, strict=True):
            held.copy_(each)
        self._graph.replay()
        assert self._loss is not None
        return self._loss

    def _record(self, *read: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(*read)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return loss

    def close(self) -> None:
        """Give back what the step holds."""
        if self.case.checkpointing:
            self.net.disable_gradient_checkpointing()
        self._graph, self._held, self._loss = None, [], None
        self.net.zero_grad(set_to_none=True)
        del self.optimizer
        free(self.device)
