"""OmniGen2, which diffusers does not have: its equations over plain tensors, one sample at a time, and a pipeline on these.

Written from the paper (arXiv:2506.18871) and the published package's order of operations (VectorSpaceLab/OmniGen2, as of
its commit 0f72fa9), in fp64 and with complex rotary tables. test/unit/models/test_omnigen2.py holds both to numbers that
the published code has printed. `forward` is the network's own modules, over sequences that are put together by loops.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle
from PIL import Image
from torch import Tensor

from difftrain.contracts import control_name

SYSTEM = "You are a helpful assistant that generates high-quality images based on user instructions."
SIZE = (64, 96)  # of the image that is shown while one is drawn


# --- the equations, of one sample


class Network:
    """The denoiser over its tensors by name. sizes: its config.json."""

    def __init__(self, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.sizes = sizes

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def rms(self, name: str, x: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.tensors[f"{name}.weight"]

    def rotations(self, places: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return e^(i place / 10000^(2k / d)) of the three axes side by side, (S, head / 2) complex."""
        rows = []
        for place in places:
            angles = []
            for position, width in zip(place, self.sizes["axes_dim_rope"]):
                angles += [position * 10000.0 ** (-2 * k / width) for k in range(width // 2)]
            rows.append(torch.tensor(angles, dtype=torch.float64))
        angles_of_all = torch.stack(rows)
        return torch.polar(torch.ones_like(angles_of_all), angles_of_all)

    def attend(self, name: str, x: Tensor, rotations: Tensor) -> Tensor:
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_kv_heads"]
        width = self.sizes["hidden_size"] // heads
        q = self.rms(f"{name}.norm_q", self.linear(f"{name}.to_q", x).view(-1, heads, width), 1e-5)
        k = self.rms(f"{name}.norm_k", self.linear(f"{name}.to_k", x).view(-1, groups, width), 1e-5)
        v = self.linear(f"{name}.to_v", x).view(-1, groups, width)
        turned = [torch.view_as_complex(z.reshape(*z.shape[:-1], -1, 2)) * rotations[:, None] for z in (q, k)]
        q, k = (torch.view_as_real(z).flatten(-2) for z in turned)
        out = []
        for head in range(heads):
            group = head * groups // heads
            weights = (q[:, head] @ k[:, group].T / width**0.5).softmax(-1)
            out.append(weights @ v[:, group])
        return self.linear(f"{name}.to_out.0", torch.cat(out, dim=-1))

    def block(self, name: str, x: Tensor, rotations: Tensor, temb: Tensor | None) -> Tensor:
        eps, one = self.sizes["norm_eps"], torch.ones(1, dtype=torch.float64)
        scale_1 = gate_1 = scale_2 = gate_2 = one
        norm = f"{name}.norm1"
        if temb is not None:
            made = self.linear(f"{norm}.linear", F.silu(temb)).chunk(4)
            scale_1, gate_1, scale_2, gate_2 = 1 + made[0], made[1].tanh(), 1 + made[2], made[3].tanh()
            norm = f"{norm}.norm"
        entering = self.rms(norm, x, eps) * scale_1
        x = x + gate_1 * self.rms(f"{name}.norm2", self.attend(f"{name}.attn", entering, rotations), eps)
        y = self.rms(f"{name}.ffn_norm1", x, eps) * scale_2
        gated = F.silu(self.linear(f"{name}.feed_forward.linear_1", y)) * self.linear(
            f"{name}.feed_forward.linear_3", y
        )
        y = self.linear(f"{name}.feed_forward.linear_2", gated)
        return x + gate_2 * self.rms(f"{name}.ffn_norm2", y, eps)

    def blocks(self, member: str, x: Tensor, rotations: Tensor, temb: Tensor | None) -> Tensor:
        number = 0
        while f"{member}.{number}.attn.to_q.weight" in self.tensors:
            x = self.block(f"{member}.{number}", x, rotations, temb)
            number += 1
        return x

    def time(self, t: float) -> Tensor:
        steps = torch.arange(128, dtype=torch.float64) / 128
        angles = t * self.sizes["timestep_scale"] * torch.exp(-np.log(10000.0) * steps)
        name = "time_caption_embed.timestep_embedder.linear"
        return self.linear(f"{name}_2", F.silu(self.linear(f"{name}_1", torch.cat((angles.cos(), angles.sin())))))

    def tokens(self, image: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """Cut an image (C, H, W) into rows of 2 x 2 pixels, channels fastest, and say in which row and column each is."""
        rows, cells = [], []
        for row in range(image.shape[1] // 2):
            for column in range(image.shape[2] // 2):
                patch = image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                rows.append(patch.permute(1, 2, 0).flatten())
                cells.append((row, column))
        return torch.stack(rows), cells

    def __call__(self, x: Tensor, t: float, text: Tensor, references: Sequence[Tensor]) -> Tensor:
        """Predict x0 - e of x (C, H, W) at t in 0 (noise) to 1, of a caption (L, J) and references (C, H, W) each."""
        temb = self.time(t)
        places = [(n, n, n) for n in range(len(text))]
        caption = self.rms("time_caption_embed.caption_embedder.0", text.double(), self.sizes["norm_eps"])
        caption = self.linear("time_caption_embed.caption_embedder.1", caption)
        sequence = [self.blocks("context_refiner", caption, self.rotations(places), None)]
        first = len(text)
        for number, reference in enumerate(references):
            rows, cells = self.tokens(reference.double())
            own = [(first, *cell) for cell in cells]
            entering = self.linear("ref_image_patch_embedder", rows) + self.tensors["image_index_embedding"][number]
            sequence.append(self.blocks("ref_image_refiner", entering, self.rotations(own), temb))
            places += own
            first += max(reference.shape[1] // 2, reference.shape[2] // 2)
        rows, cells = self.tokens(x.double())
        own = [(first, *cell) for cell in cells]
        sequence.append(self.blocks("noise_refiner", self.linear("x_embedder", rows), self.rotations(own), temb))
        places += own
        out = self.blocks("layers", torch.cat(sequence), self.rotations(places), temb)[-len(rows) :]
        out = F.layer_norm(out, out.shape[-1:], eps=1e-6) * (1 + self.linear("norm_out.linear_1", F.silu(temb)))
        out = self.linear("norm_out.linear_2", out)
        image = torch.zeros(out.shape[1] // 4, *x.shape[1:], dtype=torch.float64)
        for (row, column), values in zip(cells, out):
            image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = values.view(2, 2, -1).permute(2, 0, 1)
        return image


# --- a pipeline on them, as the published one is called


class OmniGen2Pipeline:
    """Draw one image, with text guidance alone: the prediction without text is shown no reference."""

    def __init__(self, transformer: Any, vae: Any, scheduler: Any, mllm: Any, processor: Any) -> None:
        self.transformer, self.vae, self.scheduler, self.mllm, self.processor = (
            transformer,
            vae,
            scheduler,
            mllm,
            processor,
        )

    def set_progress_bar_config(self, **options: Any) -> None:
        pass

    @torch.no_grad()
    def encode(self, caption: str, length: int = 256) -> Tensor:
        """Return the last hidden states of a caption in its chat, (L, J)."""
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": caption}]
        text = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        ids = self.processor(text, truncation=True, max_length=length, return_tensors="pt").input_ids
        return self.mllm(ids, output_hidden_states=True).hidden_states[-1][0]

    def latents(self, image: Image.Image) -> Tensor:
        """Return the mean of an image's posterior, (C, h, w); the published code draws from it."""
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).movedim(-1, 0)[None] / 127.5 - 1
        mean = self.vae.encode(pixels).latent_dist.mean[0]
        return (mean - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    @torch.no_grad()
    def __call__(
        self, prompt: str, height: int, width: int, latents: Tensor, num_inference_steps: int, output_type: str,
        text_guidance_scale: float, negative_prompt: str = "", input_images: Sequence[Image.Image] = (),
    ) -> Any:  # fmt: skip
        network = Network(self.transformer.state_dict(), self.transformer.config)
        text, without = self.encode(prompt), self.encode(negative_prompt)
        shown = [self.latents(image) for image in input_images]
        x, root = latents[0].double(), (latents.shape[-2] * latents.shape[-1]) ** 0.5 / 40
        times = [step / num_inference_steps for step in range(num_inference_steps)]
        times = [*(t / (root - root * t + t) for t in times), 1.0]
        for t, following in itertools.pairwise(times):
            predicted = network(x, t, text, shown)
            if text_guidance_scale > 1:
                plain = network(x, t, without, ())
                predicted = plain + text_guidance_scale * (predicted - plain)
            x = x + (following - t) * predicted
        assert output_type == "latent" and (height, width) == (8 * x.shape[1], 8 * x.shape[2])
        return SimpleNamespace(images=x[None].float())


def pipeline(folder: Path) -> OmniGen2Pipeline:
    """Load what an export names."""
    import diffusers
    import transformers

    from difftrain.models.networks.omnigen2 import OmniGen2Transformer2DModel

    index = json.loads((folder / "model_index.json").read_text())
    assert index["transformer"][1] == OmniGen2Transformer2DModel.__name__
    return OmniGen2Pipeline(
        OmniGen2Transformer2DModel.from_pretrained(folder / "transformer"),
        diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        getattr(transformers, index["mllm"][1]).from_pretrained(folder / "mllm").eval(),
        getattr(transformers, index["processor"][1]).from_pretrained(folder / "processor"),
    )


def prompts(pipe: OmniGen2Pipeline, captions: list[str], length: int) -> Conditions:
    tokens, masks = [], []
    for caption in captions:
        made = pipe.encode(caption, length)
        tokens.append(F.pad(made, (0, 0, 0, length - len(made))))
        masks.append(torch.arange(length) < len(made))
    return {"tokens": torch.stack(tokens), "mask": torch.stack(masks)}


# --- the network's own modules, over sequences that loops put together


def forward(net: Any, x: Tensor, t: Tensor, told: Conditions, guidance: float) -> Tensor:
    """Say what is predicted, negated: the published code predicts x0 - e."""
    (count, _, height, width), tokens = x.shape, told["tokens"]
    mask = told.get("mask", torch.ones(tokens.shape[:2], dtype=torch.bool))
    sees = told.get("shown", torch.ones(count, dtype=torch.bool))
    shown = [told[control_name(number)] for number in range(3) if control_name(number) in told]
    h, w, length = height // 2, width // 2, tokens.shape[1]

    # --- places of every sample: of text, of each reference, of the image
    cells = [(row, column) for row in range(h) for column in range(w)]
    text, others, image = [], [], []
    for sample in range(count):
        end = int(mask[sample].sum())
        text.append([(n, n, n) for n in range(length)])
        others.append([[(end + number * max(h, w), *cell) for cell in cells] for number in range(len(shown))])
        end += len(shown) * max(h, w) if sees[sample] else 0
        image.append([(end, *cell) for cell in cells])

    def rope(places: Any) -> tuple[Tensor, Tensor]:
        pairs = [net.rope_embedder.freqs_cis[axis][torch.tensor(places)[..., axis]] for axis in range(3)]
        cos, sin = torch.cat(pairs, dim=-1).unflatten(-1, (-1, 2)).unbind(-1)
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)

    def patches(latents: Tensor) -> Tensor:
        return torch.stack([
            torch.stack([one[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].permute(1, 2, 0).flatten() for r, c in cells])
            for one in latents
        ])  # fmt: skip

    # --- refined apart
    temb, caption = net.time_caption_embed(x, 1 - t / 1000, tokens)
    drawn = net.x_embedder(patches(x))
    for block in net.context_refiner:
        caption = block(caption, mask, rope(text))
    for block in net.noise_refiner:
        drawn = block(drawn, None, rope(image), temb)
    if shown:
        embedded = [
            net.ref_image_patch_embedder(patches(each)) + net.image_index_embedding[n] for n, each in enumerate(shown)
        ]
        refined = torch.stack(embedded, dim=1).flatten(0, 1)  # those of one sample one behind the other
        for block in net.ref_image_refiner:
            refined = block(
                refined, None, rope([one for own in others for one in own]), temb.repeat_interleave(len(shown), 0)
            )
        refined = refined.unflatten(0, (count, len(shown)))

    # --- one sequence each, as long as all tokens together: sums over longer rows have another order
    most = length + (1 + len(shown)) * h * w
    rows, places, seen = [], [], torch.zeros(count, most, dtype=torch.bool)
    for sample in range(count):
        end = int(mask[sample].sum())
        own, lies = [caption[sample, :end]], text[sample][:end]
        if shown and sees[sample]:
            own.append(refined[sample].flatten(0, 1))
            lies = lies + [place for one in others[sample] for place in one]
        own.append(drawn[sample])
        lies = lies + image[sample]
        seen[sample, : len(lies)] = True
        behind = most - len(lies)
        rows.append(F.pad(torch.cat(own), (0, 0, 0, behind)))
        places.append(lies + [(0, 0, 0)] * behind)
    joined = torch.stack(rows)
    for block in net.layers:
        joined = block(joined, seen, rope(places), temb)

    # --- the image's rows alone
    out = []
    for sample in range(count):
        end = int(seen[sample].sum())
        out.append(joined[sample, end - h * w : end])
    leaving = net.norm_out(torch.stack(out), temb).view(count, h, w, 2, 2, -1)
    return -leaving.permute(0, 5, 1, 3, 2, 4).reshape(count, -1, height, width)


# --- how it is called


def reference() -> np.ndarray:
    """Return the image that is shown: gradients and a block."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    pixels = np.stack([3 * x % 256, 5 * y % 256, (2 * x + y) % 256], axis=-1).astype(np.uint8)
    pixels[8:40, 30:50] = (20, 200, 90)
    return pixels


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt": PROMPT, "text_guidance_scale": scale}
    if control_name(0) in ours:
        made["input_images"] = [Image.fromarray(reference())]
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(
        options,
        references=(torch.from_numpy(reference()).movedim(-1, 0)[None],),
        kinds=({"data": {"num_control": 0}}, {"data": {"num_control": 1}}),
    ),
    pipeline=pipeline,
    num_control=2,
)
