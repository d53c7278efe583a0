"""The native engine on the real family: tiny SDXL, everything of it trained."""

from __future__ import annotations

import pytest
import torch

from difftrain.config.schema.sections import ModelSection, OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import Batch, Bucket
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.registry import make_family
from difftrain.optim import make_optimizer, make_schedule

SIZE = Bucket(64, 64)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(**training):
    cfg = TrainConfig(
        model=ModelSection(init_from_config="tiny", train_text_encoder=True),
        training=TrainingSection(seed=1, **training),
        optimizer=OptimizerSection(learning_rate=1e-4, learning_rate_te1=1e-5, scheduler="cosine", warmup_steps=1),
    )
    family = make_family(cfg)
    parts = family.load()
    engine = make_engine(cfg, choose("cpu"), Ranks())
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 10),
        [],
    )
    return engine, family.tokenizer(parts)


def batch(engine, tokenize, step: int, samples: range) -> Batch:
    """Make samples that are the same whatever batch they are in."""
    draws: dict[str, list] = {name: [] for name in engine.family.features.draws}
    pixels = []
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        pixels.append(torch.randint(0, 256, (3, SIZE.height, SIZE.width), generator=generator, dtype=torch.uint8))
        for name, spec in engine.family.features.draws.items():
            if spec.kind == "normal":
                draws[name].append(torch.randn(spec.shape(SIZE), generator=generator))
            else:
                draws[name].append(torch.randint(0, spec.high, (), generator=generator))
    sizes = {"original_size": (64, 64), "crop_top_left": (0, 0), "target_size": (64, 64)}
    features = {"pixels": torch.stack(pixels), **tokenize([f"a red star {sample}" for sample in samples])}
    features |= {name: torch.tensor([value] * len(samples)) for name, value in sizes.items()}
    stacked = {name: torch.stack(values) for name, values in draws.items()}
    ids = torch.tensor(list(samples))
    return Batch(SIZE, ids, torch.zeros_like(ids), features, stacked, counts={"samples": float(len(samples))})


def run(engine, tokenize, first: int, last: int, pieces: int = 1) -> list[float]:
    size = 4 // pieces
    losses = []
    for step in range(first, last):
        micro = [batch(engine, tokenize, step, range(i * size, (i + 1) * size)) for i in range(pieces)]
        losses.append(float(engine.step(micro, {"samples": 4.0}).sums["loss"]))
    return losses


def test_resume_is_bit_equal_and_pieces_change_only_rounding(tmp_path):
    straight, tokenize = built()
    losses = run(straight, tokenize, 0, 3)
    straight.snapshot().write(tmp_path)
    losses += run(straight, tokenize, 3, 6)
    resumed, _ = built()
    resumed.restore(tmp_path)
    assert run(resumed, tokenize, 3, 6) == losses[3:]
    ended, expected = dict(resumed.full_weights()), dict(straight.full_weights())
    assert ended.keys() == expected.keys() and all(torch.equal(ended[name], expected[name]) for name in ended)
    split, _ = built(gradient_checkpointing=True)
    assert run(split, tokenize, 0, 6, pieces=2) == pytest.approx(losses, rel=1e-6)
    frozen = {n for n, p in straight.root.named_parameters() if not p.requires_grad}
    assert frozen and all(name.startswith("text_encoder_1.") for name in frozen)
    assert {name.split(".")[0] for name, _, _ in straight.shards()} == {"unet", "text_encoder_1", "text_encoder_2"}
