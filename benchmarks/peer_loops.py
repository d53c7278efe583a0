"""Three other ways to train the same SDXL from the same folder of JPEGs: what peers.py runs beside ours, a process each.

    python benchmarks/peer_loops.py --peer=diffusers --model=FOLDER --data=FOLDER --steps=20

diffusers: the loop of its example train_text_to_image, over `datasets` (an imagefolder, transforms at each read).
kohya: the step of sd-scripts' sdxl_train, whose data set makes a whole batch at once. accelerate: the shortest loop over a
torch data set. They are written from what those do, and share nothing with difftrain. torchvision is not installed beside
a CPU build of torch, so its transforms are spelt with Pillow and numpy, operation by operation. Each prints a line a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

LR, SEED = 1e-4, 1


def transform(image: Image.Image, side: int) -> torch.Tensor:
    """Do what Resize(Lanczos), RandomCrop, RandomHorizontalFlip, ToTensor and Normalize(0.5, 0.5) of torchvision do."""
    width, height = image.size
    scale = side / min(width, height)
    size = (max(side, int(width * scale)), max(side, int(height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)
    left, top = random.randint(0, size[0] - side), random.randint(0, size[1] - side)
    image = image.crop((left, top, left + side, top + side))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    return tensor.sub_(0.5).div_(0.5)


class Parts:
    """The modules of a folder of diffusers, loaded as its example loads them: the UNet is trained."""

    def __init__(self, folder: str) -> None:
        from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        self.scheduler = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
        self.tokenizers = [CLIPTokenizer.from_pretrained(folder, subfolder=n) for n in ("tokenizer", "tokenizer_2")]
        self.first = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder").requires_grad_(False).eval()
        self.second = CLIPTextModelWithProjection.from_pretrained(folder, subfolder="text_encoder_2")
        self.second.requires_grad_(False).eval()
        self.vae = AutoencoderKL.from_pretrained(folder, subfolder="vae").requires_grad_(False).eval()
        self.unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet").train()

    def tokens(self, captions: list[str]) -> list[torch.Tensor]:
        """Tokenise captions for both encoders, (B, 77) each."""
        return [
            t(captions, max_length=77, padding="max_length", truncation=True, return_tensors="pt").input_ids
            for t in self.tokenizers
        ]

    def text(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states (B, 77, D) before the last layers, and the pooled vector."""
        with torch.no_grad():
            one = self.first(first, output_hidden_states=True)
            two = self.second(second, output_hidden_states=True)
        return torch.cat([one.hidden_states[-2], two.hidden_states[-2]], dim=-1), two.text_embeds

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Sample latents."""
        with torch.no_grad():
            return self.vae.encode(pixels).latent_dist.sample() * self.vae.config.scaling_factor

    def predict(
        self, noisy: torch.Tensor, t: torch.Tensor, hidden: torch.Tensor, pooled: torch.Tensor, side: int
    ) -> Any:
        """Call the UNet with the sizes of a whole square picture."""
        ids = torch.tensor([[side, side, 0, 0, side, side]], dtype=torch.float32).expand(len(noisy), -1)
        added = {"text_embeds": pooled, "time_ids": ids}
        return self.unet(noisy, t, hidden, added_cond_kwargs=added, return_dict=False)[0]


def report(step: int) -> None:
    """Tell whoever waits at the other end of the pipe."""
    print(f"step={step}", flush=True)


def endless(loader: Any) -> Iterator[Any]:
    """Go through a loader for ever."""
    while True:
        yield from loader


# --- diffusers' example


def train_diffusers(options: argparse.Namespace) -> None:
    """Train as examples/text_to_image/train_text_to_image.py does, with SDXL's conditions."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from datasets import load_dataset
    from diffusers.optimization import get_scheduler

    accelerator = Accelerator(gradient_accumulation_steps=1)
    set_seed(SEED)
    parts = Parts(options.model)
    found = load_dataset("imagefolder", data_dir=options.data, cache_dir=options.cache)

    def preprocess(examples: dict[str, list[Any]]) -> dict[str, Any]:
        pictures = [image.convert("RGB") for image in examples["image"]]
        examples["pixel_values"] = [transform(image, options.resolution) for image in pictures]
        examples["ids_1"], examples["ids_2"] = parts.tokens(list(examples["text"]))
        return examples

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([e["pixel_values"] for e in examples]).to(memory_format=torch.contiguous_format).float()
        return {"pixels": pixels} | {n: torch.stack([e[n] for e in examples]) for n in ("ids_1", "ids_2")}

    # batches that are full are compared: the example would also train on an epoch's small last one
    loader = DataLoader(
        found["train"].with_transform(preprocess), shuffle=True, collate_fn=collate, batch_size=options.batch_size,
        num_workers=options.workers, drop_last=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parts.unet.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    schedule = get_scheduler("constant", optimizer=optimizer, num_warmup_steps=0, num_training_steps=options.steps)
    parts.unet, optimizer, loader, schedule = accelerator.prepare(parts.unet, optimizer, loader, schedule)
    for step, batch in zip(range(1, options.steps + 1), endless(loader)):
        with accelerator.accumulate(parts.unet):
            latents = parts.encode(batch["pixels"])
            noise = torch.randn_like(latents)
            t = torch.randint(0, parts.scheduler.config.num_train_timesteps, (len(latents),)).long()
            noisy = parts.scheduler.add_noise(latents, noise, t)
            hidden, pooled = parts.text(batch["ids_1"], batch["ids_2"])
            predicted = parts.predict(noisy, t, hidden, pooled, options.resolution)
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
            accelerator.gather(loss.repeat(options.batch_size)).mean().item()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parts.unet.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        report(step)


# --- kohya's step


class WholeBatches(Dataset):
    """A data set whose item is a batch, as kohya's is: pictures resized by area where they shrink, captions tokenised."""

    def __init__(self, options: argparse.Namespace, tokens: Callable[[list[str]], list[torch.Tensor]]) -> None:
        self.files = sorted(Path(options.data).glob("*.jpg"))
        self.size, self.side, self.tokens = options.batch_size, options.resolution, tokens
        self.captions = captions_of(options.data)
        random.Random(SEED).shuffle(self.files)

    def __len__(self) -> int:
        return len(self.files) // self.size

    def __getitem__(self, place: int) -> dict[str, Any]:
        pictures, captions = [], []
        for path in self.files[place * self.size : (place + 1) * self.size]:
            image = Image.open(path).convert("RGB")
            scale = self.side / min(image.size)
            size = (max(self.side, round(image.width * scale)), max(self.side, round(image.height * scale)))
            pixels = np.array(image.resize(size, Image.Resampling.BOX))  # its cv2.INTER_AREA
            top, left = (pixels.shape[0] - self.side) // 2, (pixels.shape[1] - self.side) // 2
            pixels = pixels[top : top + self.side, left : left + self.side]
            if random.random() < 0.5:
                pixels = pixels[:, ::-1].copy()
            tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
            pictures.append(tensor.sub_(0.5).div_(0.5))
            captions.append(self.captions[path.name])
        return {"images": torch.stack(pictures).float(), "tokens": self.tokens(captions)}


def train_kohya(options: argparse.Namespace) -> None:
    """Train as sd-scripts' sdxl_train does without its caches: a loss for each sample, its mean, item() at every step."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator()
    set_seed(SEED)
    parts = Parts(options.model)
    loader = DataLoader(
        WholeBatches(options, parts.tokens), batch_size=1, shuffle=True, collate_fn=lambda rows: rows[0],
        num_workers=options.workers, persistent_workers=options.workers > 0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parts.unet.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parts.unet, optimizer, loader, schedule = accelerator.prepare(parts.unet, optimizer, loader, schedule)
    recorded: list[float] = []
    for step, batch in zip(range(1, options.steps + 1), endless(loader)):
        with accelerator.accumulate(parts.unet):
            latents = parts.encode(batch["images"])
            if torch.any(torch.isnan(latents)):
                latents = torch.nan_to_num(latents, 0, out=latents)
            hidden, pooled = parts.text(*batch["tokens"])
            noise = torch.randn_like(latents)
            t = torch.randint(0, parts.scheduler.config.num_train_timesteps, (len(latents),))
            noisy = parts.scheduler.add_noise(latents, noise, t)
            predicted = parts.predict(noisy, t, hidden, pooled, options.resolution)
            # a mean over pixels first, so that samples may weigh differently
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="none").mean([1, 2, 3]).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parts.unet.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        recorded.append(loss.detach().item())
        report(step)


# --- accelerate's loop


class Pictures(Dataset):
    """A picture and its caption's tokens an item."""

    def __init__(self, options: argparse.Namespace, tokens: Callable[[list[str]], list[torch.Tensor]]) -> None:
        self.files, self.side, self.tokens = sorted(Path(options.data).glob("*.jpg")), options.resolution, tokens
        self.captions = captions_of(options.data)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        with Image.open(self.files[place]) as image:
            pixels = transform(image.convert("RGB"), self.side)
        return pixels, *(ids[0] for ids in self.tokens([self.captions[self.files[place].name]]))


def train_accelerate(options: argparse.Namespace) -> None:
    """Train by the loop of accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(SEED)
    parts = Parts(options.model)
    data = Pictures(options, parts.tokens)
    loader = DataLoader(data, options.batch_size, shuffle=True, num_workers=options.workers, drop_last=True)
    optimizer = torch.optim.AdamW(parts.unet.parameters(), lr=LR)
    parts.unet, optimizer, loader = accelerator.prepare(parts.unet, optimizer, loader)
    for step, (pixels, first, second) in zip(range(1, options.steps + 1), endless(loader)):
        optimizer.zero_grad()
        latents = parts.encode(pixels)
        hidden, pooled = parts.text(first, second)
        noise, t = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
        predicted = parts.predict(parts.scheduler.add_noise(latents, noise, t), t, hidden, pooled, options.resolution)
        accelerator.backward(F.mse_loss(predicted, noise))
        accelerator.clip_grad_norm_(parts.unet.parameters(), 1.0)
        optimizer.step()
        report(step)


def captions_of(folder: str) -> dict[str, str]:
    """Read the captions by file name."""
    rows = map(json.loads, (Path(folder) / "metadata.jsonl").read_text("utf-8").splitlines())
    return {row["file_name"]: row["text"] for row in rows}


PEERS = {"diffusers": train_diffusers, "kohya": train_kohya, "accelerate": train_accelerate}


def main() -> None:
    """Train as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", required=True, help="diffusers folder of an SDXL")
    parser.add_argument("--data", required=True, help="folder of JPEGs and metadata.jsonl")
    parser.add_argument("--cache", help="folder that `datasets` writes to")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    PEERS[options.peer](options)


if __name__ == "__main__":
    main()
