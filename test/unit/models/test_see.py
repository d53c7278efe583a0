"""Reference images as an encoder of captions sees them: sizes, patches and positions are those of transformers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import config, made
from PIL import Image

from difftrain.contracts import Bucket, ConfigFault
from difftrain.models.text.see import IMAGE, Sight, processor_of

REAL = Sight(1024 * 1024, 1, 151655)  # as released
SMALL = Sight(384 * 384, 2, 5, patch=7, merge=3, frames=2, fewest=3000, most=40_000)
SHAPES = [(64, 96), (31, 500), (1024, 1024), (333, 77), (640, 1536)]


def noise(count: int, size_hw: tuple[int, int]) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(size_hw[0])
    return torch.randint(0, 256, (count, 3, *size_hw), dtype=torch.uint8, generator=drawn)


@pytest.mark.parametrize("size_hw", SHAPES)
@pytest.mark.parametrize("sight", [REAL, SMALL], ids=["real", "small"])
def test_patches_are_those_of_transformers_to_the_bit(sight: Sight, size_hw: tuple[int, int]) -> None:
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = noise(2, size_hw)
    dimensions = getattr(
        pipeline_qwenimage_edit_plus, "original_dimensions", pipeline_qwenimage_edit_plus.calculate_dimensions
    )
    width, height = dimensions(sight.area, size_hw[1] / size_hw[0])
    images = [Image.fromarray(each.movedim(0, -1).numpy()) for each in pixels]
    images = [VaeImageProcessor(vae_scale_factor=16).resize(each, height, width) for each in images]
    told = {key: value for key, value in sight.stored().items() if not key.endswith(("_type", "_class"))}
    theirs = Qwen2VLImageProcessorPil(**told)(images, return_tensors="pt")
    ours = sight.patches(pixels)
    assert torch.equal(ours.flatten(0, 1), theirs["pixel_values"])
    grid = theirs["image_grid_thw"][0].tolist()
    assert grid == [1, *(side // sight.patch for side in sight.sizes(size_hw)[1])]
    assert sight.rows(size_hw) == grid[1] * grid[2] // sight.merge**2


def test_a_released_encoder_has_a_row_for_each_28_px() -> None:
    assert REAL.sizes((1024, 1024)) == ((1024, 1024), (1036, 1036)) and REAL.rows((512, 512)) == 37 * 37
    plus = Sight(384 * 384, 3, 151655)
    assert plus.rows((1024, 1024)) == 14 * 14 and plus(Bucket(1024, 1024)) == 3 * (14 * 14 - 1)
    assert pickle.loads(pickle.dumps(plus)) == plus
    with pytest.raises(ValueError, match="200"):
        REAL.sizes((10, 3000))


def test_a_mark_becomes_a_row_for_each_cell_and_positions_have_rows_and_columns() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    family = made(config("qwen_image_edit_plus", {"data": {"num_control": 2}}))
    sight = family.sights[0]
    assert sight is not None and sight.count == 2
    tokens = family.tokenizer(None)(["a cat", "a much longer caption"])  # type: ignore[arg-type]
    ids, mask = tokens["input_ids_1"], tokens["mask_1"]
    images = [noise(2, (64, 96)), noise(2, (64, 96))]
    kept = torch.tensor([True, False])
    wide, wide_mask, more = sight.inputs(ids, mask, images, kept)
    rows = sight.rows((64, 96))
    assert wide.shape[1] == ids.shape[1] + 2 * (rows - 1) and int((wide[0] == sight.mark).sum()) == 2 * rows
    assert int(wide_mask[1].sum()) == int(mask[1].sum()) + 2 * (rows - 1)
    one, other = more["pixel_values"].unflatten(0, (2, -1))
    assert one.any() and not other.any(), "of a dropped reference nothing is seen"

    encoder = family.source.build("text_encoder")
    assert isinstance(encoder, Qwen2_5_VLForConditionalGeneration)
    places, _ = encoder.model.get_rope_index(
        wide, more["mm_token_type_ids"], more["image_grid_thw"], attention_mask=wide_mask
    )
    seen = places[:, 0, wide[0] == sight.mark][:, :rows]
    height, width = (side // (sight.patch * sight.merge) for side in sight.sizes((64, 96))[1])
    assert seen[1].unique().numel() == height and seen[2].unique().numel() == width and height != width


def test_sizes_that_do_not_go_with_what_lies_beside_them_are_named() -> None:
    sizes = {
        "image_token_id": 5,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    told = REAL.stored()
    assert Sight.of(REAL.area, 1, sizes | {"image_token_id": 151655}, told) == REAL
    with pytest.raises(ValueError, match="patch_size"):
        Sight.of(1, 1, sizes, {**told, "patch_size": 16})
    assert Sight.of(1, 1, sizes, {"size": {"longest_edge": 99}}).most == 99
    assert np.allclose(Sight.of(1, 1, sizes, {}).mean, REAL.mean)


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_folder_says_of_images_is_read_from_either_file(nested: bool, tmp_path: Path) -> None:
    told: dict[str, Any] = REAL.stored() | {"max_pixels": 98_000}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": told} if nested else told))
    assert processor_of(tmp_path)["max_pixels"] == 98_000 and processor_of(tmp_path / "nowhere") == {}
    (tmp_path / name).write_text("[]")
    assert processor_of(tmp_path) == {}


def test_what_an_encoder_that_sees_does_not_go_with_is_named() -> None:
    def said(**sections: object) -> str:
        family = made(config("qwen_image_edit", {key: value for key, value in sections.items()}))
        with pytest.raises(ConfigFault) as caught:
            family.load(meta=True)
        return str(caught.value)

    told = said(data={"control_dropout": 0.1}, cache={"text_to_disk": True})
    assert "control_dropout" in told and "cache_text_encoder_outputs_to_disk" in told
    assert "llm_max_length" in said(model={"llm_max_length": 16})
    online = made(config("qwen_image_edit", {"data": {"control_dropout": 0.1}, "cache": {"text_to_disk": False}}))
    online.load(meta=True)


def test_a_caption_cannot_stand_for_an_image() -> None:
    family = made(config("qwen_image_edit"))
    plain, marked = family.tokenizer(None)(["a cat", f"a {IMAGE}cat"])["input_ids_1"]  # type: ignore[arg-type]
    assert torch.equal(plain, marked)
