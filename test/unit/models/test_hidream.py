"""What the contract suite cannot see of HiDream: a layer that several blocks read, heads, sizes, and vocabularies."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Tiny, batch_of, config, diffusers_forward, exported, loaded, own_pass, pipeline_of
from family_oracles.hidream import prompts
from refusals import names

from difftrain.contracts import Bucket, ConfigFault
from difftrain.models.facts import Text
from difftrain.models.registry import make_family
from difftrain.models.text.llm_vocabulary import LlmVocabulary

CAPTIONS = ("a red cat beside a sign", "")


def sizes(**transformer: Any) -> dict[str, Any]:
    shipped = resources.files("difftrain.models").joinpath("sizes_shipped", "hidream.tiny.json")
    content = json.loads(shipped.read_text("utf-8"))
    content["transformer"] |= transformer
    return content


def written(folder: Path, content: dict[str, Any]) -> str:
    (folder / "sizes.json").write_text(json.dumps(content))
    return str(folder / "sizes.json")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model of two heads whose blocks share layers, of CLIP encoders with more positions than are read."""
    content = sizes(attention_head_dim=16, num_attention_heads=2, axes_dims_rope=[8, 4, 4], llama_layers=[1, 3, 3, 1])
    content["text_encoder"]["max_position_embeddings"] = content["text_encoder_2"]["max_position_embeddings"] = 248
    return loaded(config("hidream", init_from_config=written(tmp_path_factory.mktemp("sizes"), content)))


def test_a_layer_that_several_blocks_read_is_made_once(shared: Tiny, tmp_path: Path) -> None:
    made = shared.family.text(batch_of(shared.family, Bucket(64, 64), CAPTIONS), shared.parts)
    assert shared.family.texts[-1].layers == (2, 4) and made["states"].shape == (2, 128, 2 * 24)
    with torch.no_grad():
        theirs = prompts(pipeline_of(exported(shared, tmp_path / "folder"), "hidream"), list(CAPTIONS), 128)
    for name, value in theirs.items():
        torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5)


# square, filled up, and with more tokens than are filled up to, which diffusers has no place for
@pytest.mark.parametrize(("size", "tokens"), [((64, 64), 16), ((96, 64), 64), ((64, 128), 64)])
def test_the_pass_is_diffusers_forward(shared: Tiny, size: tuple[int, int], tokens: int) -> None:
    family = shared.family
    inputs = family.inputs(batch_of(family, Bucket(*size), CAPTIONS), shared.parts)
    with torch.no_grad():
        assert torch.equal(own_pass(shared, inputs), diffusers_forward(shared, inputs))
        entered = family.enter(shared.net, inputs.x_t, inputs.timestep, inputs.conditions)
    assert entered.image.shape[1] == tokens == family.image_tokens(size[0] // 16, size[1] // 16)


def test_images_beyond_the_largest_are_not_filled_up(shared: Tiny) -> None:
    inputs = shared.family.inputs(batch_of(shared.family, Bucket(128, 192), CAPTIONS), shared.parts)
    assert shared.family.image_tokens(8, 12) == 96
    assert own_pass(shared, inputs).shape == inputs.x_t.shape


@pytest.mark.parametrize(
    ("layers", "facts"), [([0, 1, 2], ["3", "4"]), ([0, 1, 2, 4], ["4"]), (None, ["llama_layers"])]
)
def test_layers_that_are_not_there_are_named(layers: list[int] | None, facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigFault) as caught:
        _ = make_family(config("hidream", init_from_config=written(tmp_path, sizes(llama_layers=layers)))).features
    (fault,) = caught.value.faults
    assert names(str(fault), "[transformer]", *facts)


def test_clip_reads_as_far_as_the_pipeline_asks(shared: Tiny) -> None:
    ids = shared.family.tokenizer(shared.parts)(["cat " * 300])
    assert ids["input_ids_1"].shape == ids["input_ids_2"].shape == (1, 128)


def test_texts_are_filled_up_with_what_ends_them(tmp_path: Path) -> None:
    text = Text("text_encoder_4", "tokenizer_4", "llm", 8, masked=True, pads_end=True)
    LlmVocabulary.small(text, 384).save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "pad_token": None, "eos_token": {"content": "<|startoftext|>"}}))
    assert LlmVocabulary.read(tmp_path, text).pad == "<|startoftext|>"


def test_a_language_model_brings_its_tokenizer(shared: Tiny, tmp_path: Path) -> None:
    """Its own repository has both in one folder, and a release has neither."""
    folder = exported(shared, tmp_path / "folder")
    (folder / "text_encoder_4").rename(tmp_path / "llama")
    for file in (folder / "tokenizer_4").iterdir():
        file.rename(tmp_path / "llama" / file.name)
    (folder / "tokenizer_4").rmdir()
    again = loaded(config("hidream", pretrained=str(folder), text_encoder4=str(tmp_path / "llama")))
    ours, theirs = (tiny.family.tokenizer(tiny.parts)(["a cat"]) for tiny in (shared, again))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert float(again.loss().detach()) == float(shared.loss().detach())
