"""Factors of LoRA in training: rates of their own, and a bound on the norm of their product, as kohya's scripts mean both."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from family_engines import assembled, commit, equal, family_run, weights

from difftrain.adapters import NormBound, by_factor
from difftrain.adapters.factors import product_norm
from difftrain.config.parse_flags import parse
from difftrain.config.schema.rates import group_rates
from difftrain.contracts import METRIC, Group
from difftrain.distributed.ranks import Ranks
from difftrain.engine.checkpointing import CheckpointedEngine


def engine(**adapter: Any) -> CheckpointedEngine:
    """Build one process on a tiny Flux with LoRA, whose other weights are no zeros."""
    sections = {"adapter": {"type": "lora", "rank": 2, "alpha": 4.0} | adapter, "optimizer": {"learning_rate": 0.05}}
    family = families.made(families.config("flux", sections))
    parts = family.load()
    families.trained_once(families.Tiny(family, parts, None))
    return assembled(family.cfg, Ranks(), family, parts, [])


class Values(dict[str, torch.Tensor]):
    """Weights as an engine keeps them."""

    def value(self, name: str) -> torch.Tensor:
        return self[name]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], model: dict[str, torch.Tensor]) -> None:
        self.update(tensors)

    def holds(self, name: str) -> bool:
        return name in self

    def gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.mark.flags("scale_weight_norms")
def test_a_product_above_the_bound_is_brought_to_it_by_both_factors_alike() -> None:
    """The formula as kohya's scripts have it, over products that are made: here they are not."""
    root = engine().root
    bound, generator = NormBound(root, 1.5), torch.Generator().manual_seed(0)
    values = Values({name: torch.randn(value.shape, generator=generator) * (0.02 if "to_q" in name else 1.0)
                     for name, value in root.named_parameters() if ".lora_" in name})  # fmt: skip
    before = dict(values)
    measured = bound(values)
    norms, scaled = [], 0
    for name in (name for name in before if ".lora_A." in name):
        other = name.replace(".lora_A.", ".lora_B.")
        norm = 2.0 * (before[other] @ before[name]).norm()  # alpha / rank
        ratio = min(1.0, 1.5 / float(norm))
        for factor in (name, other):
            torch.testing.assert_close(values[factor], before[factor] * ratio**0.5)
            assert ratio < 1 or torch.equal(values[factor], before[factor]), "what is within it stays, bit by bit"
        norms.append(float(norm) * ratio)
        scaled += ratio < 1
    assert 0 < scaled < len(norms)
    expected = {"keys_scaled": scaled, "average_key_norm": sum(norms) / len(norms), "max_key_norm": max(norms)}
    assert measured.keys() == {f"{METRIC}max_norm/{name}" for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(measured[f"{METRIC}max_norm/{name}"], torch.tensor(float(value)))


def test_the_norm_of_a_product_of_convolutions_is_that_of_the_convolution() -> None:
    a, b = torch.randn(3, 5, 3, 3), torch.randn(7, 3, 1, 1)
    made = torch.nn.functional.conv2d(a.permute(1, 0, 2, 3), b).permute(1, 0, 2, 3)
    torch.testing.assert_close(product_norm(a, b), made.norm())


def test_a_bound_and_rates_hold_in_every_step_and_over_a_restart(tmp_path: Path) -> None:
    asked = {"scale_weight_norms": 0.02, "loraplus_lr_ratio": 4.0}
    straight = engine(**asked)
    groups = {group["name"]: (group["lr"], len(group["params"])) for group in straight.optimizer.param_groups}
    count = groups["transformer"][1]
    assert groups == {"transformer": (0.05, count), "transformer_plus": (0.2, count)} and count
    losses = family_run(straight, 0, 2)
    folder = commit(straight, tmp_path, "two")
    losses += family_run(straight, 2, 3)
    values = weights(straight)
    norms = [
        2.0 * (values[name.replace("_A.", "_B.")] @ value).norm() for name, value in values.items() if "lora_A" in name
    ]
    assert float(max(norms)) == pytest.approx(0.02, rel=1e-4), "no product is above the bound, and some have come to it"
    other = engine(**asked)
    family_run(other, 5, 6)  # what it had before does not matter
    other.restore(folder)
    assert family_run(other, 2, 3) == losses[2:] and equal(weights(other), weights(straight))


def test_groups_without_second_factors_and_a_ratio_of_1_stay_as_they_are() -> None:
    names = ("x.lora_A.default.weight", "x.lora_B.default.weight")
    group = Group("unet", [(name, torch.nn.Parameter(torch.zeros(1))) for name in names], 1e-3)
    assert by_factor(group, 1.0) == [group]
    first, second = by_factor(group, 16.0)
    assert [name for name, _ in first.named_params] == [names[0]] and (first.name, first.lr) == ("unet", 1e-3)
    assert [name for name, _ in second.named_params] == [names[1]] and second.lr == pytest.approx(0.016)
    assert len(by_factor(first, 16.0)) == 1


@pytest.mark.flags("network_args", "scale_weight_norms")
def test_kohyas_words_are_rates_of_parts(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    line = ["--init_from_config=tiny", f"--train_data_dir={tmp_path}/pictures", "--resolution=64,64", f"--output_dir={tmp_path}/o",
            "--network_module=networks.lora", "--learning_rate=1e-4", "--scale_weight_norms=1"]  # fmt: skip
    cfg = parse([*line, "--network_args", "loraplus_lr_ratio=16", "loraplus_text_encoder_lr_ratio=4"]).config
    assert cfg.adapter.scale_weight_norms == 1.0
    assert sorted(group_rates(cfg)) == pytest.approx([1e-4, 4e-4, 16e-4])
    cfg = parse([*line, "--network_train_unet_only", "--network_args", "loraplus_unet_lr_ratio=2"]).config
    assert sorted(group_rates(cfg)) == pytest.approx([1e-4, 2e-4])
