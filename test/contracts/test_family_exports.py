"""What is exported is complete for diffusers and transformers, and is read back to the bit."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from families import (
    FAMILIES,
    ORACLES,
    Tiny,
    config,
    exported,
    loaded,
    made,
    pipeline_of,
)
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from difftrain.models.build import build, class_of, is_transformers
from difftrain.models.placeholder import fill
from difftrain.models.weights.folder_export import file_name, is_second_name, second_names
from difftrain.models.weights.initial import by_fan_in, initial_weights
from difftrain.models.weights.keys import KeyMap, KeyPiece


def held(tiny: Tiny) -> dict[str, torch.nn.Module]:
    return {tiny.family.denoiser: tiny.net, **tiny.parts.frozen}


def equal(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    one, other = ours.state_dict(), theirs.state_dict()
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_every_part_loads_with_nothing_missing_or_unexpected(tiny: Tiny, folder: Path) -> None:
    for part, module in held(tiny).items():
        kind = tiny.family.parts[part]
        read, told = class_of(kind).from_pretrained(folder / tiny.family.folder(part), output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], part
        assert equal(module, read), part


def test_the_pipeline_loads_it_with_all_its_parts(name: str, tiny: Tiny, folder: Path) -> None:
    pipe = pipeline_of(folder, name)
    index = json.loads((folder / "model_index.json").read_text())
    parameters = inspect.signature(type(pipe).__init__).parameters.values()
    needed = {each.name for each in parameters if each.default is inspect.Parameter.empty} - {"self", "kwargs"}
    assert needed <= set(index) and index["_class_name"] == FAMILIES[name].pipeline
    absent = {each for each in index if isinstance(index[each], list) and getattr(pipe, each, None) is None}
    assert not absent - {each for each in index if index[each] == [None, None]}
    for part, module in held(tiny).items():
        assert equal(module, getattr(pipe, tiny.family.folder(part))), part
    ours, theirs = tiny.family.scheduler().config, pipe.scheduler.config
    assert all(theirs[key] == value for key, value in ours.items() if not key.startswith("_"))


def test_a_folder_is_read_back_to_the_bit(name: str, tiny: Tiny, folder: Path) -> None:
    again = loaded(config(name, pretrained=str(folder)))
    for part, module in held(tiny).items():
        assert equal(module, held(again)[part]), part
    assert float(again.loss().detach()) == float(tiny.loss().detach())
    assert tiny.family.tokenizer(tiny.parts).identity == again.family.tokenizer(again.parts).identity


def test_exports_of_exports_link_what_is_frozen(name: str, folder: Path, tmp_path: Path) -> None:
    again = loaded(config(name, pretrained=str(folder)))
    if again.family.writes_as_kohya:
        pytest.skip("each of its files has the header of its run")
    second = exported(again, tmp_path / "second")
    for file in folder.rglob("*.safetensors"):
        assert file.read_bytes() == (second / file.relative_to(folder)).read_bytes(), file.name
    if again.family.writes_as_kohya:
        return  # nothing of such an export is another's file
    part = next(iter(again.parts.frozen))
    files = list((second / again.family.folder(part)).glob("*.safetensors"))
    assert files and all(each.stat().st_nlink > 1 for each in files)


def test_half_precision_exports_are_the_rounded_weights(tiny: Tiny, tmp_path: Path) -> None:
    weights = iter(tiny.weights().items())
    path = tiny.family.export(weights, tiny.parts, "diffusers_safetensors", tmp_path / "half", dtype=torch.bfloat16)
    for part, module in held(tiny).items():
        kind, stored = tiny.family.parts[part], {}
        for file in (path / tiny.family.folder(part)).glob("*.safetensors"):
            stored |= load_file(file)
        second = second_names(kind, module)
        for key, value in module.state_dict().items():
            if key not in second:
                wanted = value.to(torch.bfloat16) if value.is_floating_point() else value
                assert torch.equal(stored[file_name(kind, key)], wanted), key


def test_one_file_of_the_original_layout_is_read_back(name: str, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    if "safetensors" not in FAMILIES[name].layouts or tiny.family.infer is None or tiny.family.one_file is not None:
        pytest.skip("it has no file of its denoiser alone")
    file = exported(tiny, tmp_path / "one", "safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt" and opened.metadata()["title"] == "tiny"
        keys = set(opened.keys())
    own = {key.partition(".")[2] for key in tiny.weights()}
    assert (keys == own) == (not tiny.family.keys)
    again = loaded(config(name, pretrained=str(folder), transformer=str(file)))
    assert equal(tiny.net, again.net)
    given, told = tiny.family.source.complete(tiny.family.denoiser), again.family.source.sizes[tiny.family.denoiser]
    plain = json.loads(json.dumps(given))
    assert {key: plain[key] for key in told} == json.loads(json.dumps(told)), "the sizes are told by the shapes"


def test_a_prefix_of_whole_models_is_taken_off(name: str, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    if "safetensors" not in FAMILIES[name].layouts or tiny.family.infer is None or tiny.family.one_file is not None:
        pytest.skip("it has no file of its denoiser alone")
    from safetensors.torch import save_file

    file = exported(tiny, tmp_path / "one", "safetensors")
    whole = {f"model.diffusion_model.{key}": value for key, value in load_file(file).items()}
    save_file(whole, tmp_path / "whole.safetensors")
    again = loaded(config(name, pretrained=str(folder), transformer=str(tmp_path / "whole.safetensors")))
    assert equal(tiny.net, again.net)


@pytest.mark.parametrize("layout", ["safetensors", "ckpt"])
def test_one_file_of_all_parts_is_read_back(name: str, tiny: Tiny, tmp_path: Path, layout: str) -> None:
    if tiny.family.one_file is None or layout not in FAMILIES[name].layouts:
        pytest.skip("it has no such file of all parts")
    again = loaded(config(name, pretrained=str(exported(tiny, tmp_path / "whole", layout))))
    for part, module in held(tiny).items():
        assert equal(module, held(again)[part]), part
    assert {**tiny.parts.config, "name": ""} == {**again.parts.config, "name": ""}, "the sizes are told by the file"
    assert float(again.loss().detach()) == float(tiny.loss().detach())


def test_one_file_of_all_parts_is_what_diffusers_converts(name: str, tiny: Tiny, tmp_path: Path) -> None:
    facts = tiny.family.one_file
    if facts is None:
        pytest.skip("it has no file of all parts")
    file = exported(tiny, tmp_path / "whole", "safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["title"] == "tiny"
    stored, converters = load_file(file), ORACLES[name].whole
    assert set(facts.beside) <= set(stored) and set(converters) == set(tiny.family.parts)
    prefixes = tuple(facts.prefixes.values())
    assert [key for key in stored if not key.startswith(prefixes) and key not in facts.beside] == []
    for part, module in held(tiny).items():
        kind = tiny.family.parts[part]
        ours = {
            file_name(kind, key): value for key, value in module.state_dict().items() if not is_second_name(kind, key)
        }
        theirs = converters[part](stored, module, facts.prefixes[part])
        assert theirs.keys() - ours.keys() <= {"text_model.embeddings.position_ids"}, part
        assert ours.keys() <= theirs.keys(), part
        assert [key for key, value in ours.items() if not torch.equal(value, theirs[key])] == [], part


def released() -> list[Any]:
    cases = [(name, size) for name, oracle in ORACLES.items() for size in oracle.released]
    assert {name for name, _ in cases} == {name for name, oracle in ORACLES.items() if oracle.converter}
    return [pytest.param(name, size, id=f"{name}-{size}") for name, size in cases]


@pytest.mark.parametrize(("family", "size"), released())
def test_the_table_of_keys_is_diffusers_converter_row_by_row(family: str, size: str) -> None:
    """Feed diffusers' converter tensors whose values are the numbers of their rows, at the sizes of a release."""
    from diffusers.loaders import single_file_utils

    oracle, kit = ORACLES[family], made(config(family))
    sizes, count = oracle.released[size]
    module = build(kit.parts[kit.denoiser], kit.denoiser, sizes)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    rule = kit.rule(kit.denoiser)
    places = KeyMap(shapes, KeyPiece if rule is None else rule(module))
    rows, base = {}, 0
    for key, shape in places.stored.items():
        length = shape[0] if shape else 1
        rows[key] = torch.arange(base, base + length).view(length, *(1,) * (len(shape) - 1))
        base += length
    wanted = {}
    for name, piece in places.pieces.items():
        part = rows[piece.key][piece.start : piece.start + (shapes[name] or (1,))[0]]
        wanted[name] = torch.cat(part.chunk(2)[::-1]) if piece.halves else part
    named = isinstance(oracle.converter, str)
    theirs = (getattr(single_file_utils, oracle.converter) if named else oracle.converter)(dict(rows))
    assert len(shapes) == count and theirs.keys() == wanted.keys()
    assert [name for name, part in wanted.items() if not torch.equal(part.flatten(), theirs[name].flatten())] == []
    read = kit.infer({key: (shape or (1,)) for key, shape in places.stored.items()}) if kit.infer else {}
    complete = json.loads(json.dumps(dict(module.config)))
    assert {key: complete[key] for key in read} == json.loads(json.dumps(read))


# ------------------------------------------------------------------ transformers' names of tensors

_CLIP = {
    "vocab_size": 600, "hidden_size": 16, "intermediate_size": 32, "projection_dim": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
_T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_QWEN = {
    "text_config": {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    },
}  # fmt: skip
_QWEN3 = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
_CLIP_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "projection_dim": 16,
}  # fmt: skip
_MISTRAL3 = {
    "text_config": {"model_type": "mistral", **_QWEN3},
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
# class -> sizes, and a name that every reader of its files knows
ENCODERS: dict[str, tuple[dict[str, Any], str]] = {
    "CLIPTextModel": (_CLIP, "text_model.encoder.layers.0.mlp.fc1.weight"),
    "CLIPTextModelWithProjection": (_CLIP, "text_projection.weight"),
    "T5EncoderModel": (_T5, "shared.weight"),
    "UMT5EncoderModel": (_T5, "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"),
    "Qwen2_5_VLForConditionalGeneration": (_QWEN, "model.layers.0.self_attn.q_proj.weight"),
    "Qwen3Model": (_QWEN3, "model.layers.0.self_attn.q_proj.weight"),
    "Qwen3ForCausalLM": (_QWEN3, "lm_head.weight"),
    "LlamaModel": (_QWEN3, "layers.0.self_attn.q_proj.weight"),
    "CLIPVisionModel": (_CLIP_VISION, "vision_model.encoder.layers.0.mlp.fc1.weight"),
    "SiglipVisionModel": (
        {key: value for key, value in _CLIP_VISION.items() if key != "projection_dim"},
        "vision_model.encoder.layers.0.mlp.fc1.weight",
    ),
    "Qwen2_5_VLTextModel": (_QWEN["text_config"], "layers.0.self_attn.q_proj.weight"),
    "LlamaForCausalLM": (_QWEN3, "model.layers.0.self_attn.q_proj.weight"),
    "Mistral3ForConditionalGeneration": (_MISTRAL3, "language_model.model.layers.0.self_attn.q_proj.weight"),
    "Gemma2Model": (_QWEN3, "layers.0.self_attn.q_proj.weight"),
}


def test_every_encoder_of_a_row_is_among_those_that_are_held_to_transformers() -> None:
    used = {kind for row in FAMILIES.values() for kind in row.parts.values() if is_transformers(kind)}
    assert used == {f"transformers:{name}" for name in ENCODERS}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_names_in_files_are_those_that_transformers_reads(encoder: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    sizes, known = ENCODERS[encoder]
    kind = f"transformers:{encoder}"
    module = build(kind, "encoder", sizes)
    drawn = list(initial_weights(module, "encoder", 1, by_fan_in))
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    fixed = [(name, value) for name, value in module.state_dict().items() if name not in parameters]
    fill(module, [*fixed, *drawn], torch.float32)
    second = second_names(kind, module)
    tensors = {
        file_name(kind, name): value.clone() for name, value in module.state_dict().items() if name not in second
    }
    assert known in tensors
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    module.config.save_pretrained(tmp_path)
    read, told = class_of(kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert equal(module, read)


def test_the_page_beside_a_folder_draws(name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the snippet as it stands, but for steps and size; in half precision, as no dtype would fail."""
    weights = iter(tiny.weights().items())
    path = tiny.family.export(weights, tiny.parts, "diffusers_safetensors", tmp_path / "half", dtype=torch.bfloat16)
    page = (path / "README.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert "torch_dtype=torch.bfloat16" in code
    monkeypatch.chdir(path)
    pipeline = FAMILIES[name].pipeline
    if (module := FAMILIES[name].pipeline_module) != "diffusers":
        assert f"\nfrom {module} import {pipeline}\n" in code and compile(code, pipeline, "exec")
        pytest.skip("its pipeline is the release's own, which is not installed")
    # one pipeline brings what it draws to the area of this many latent pixels a side
    before = "pipe.set_progress_bar_config(disable=True); pipe.default_sample_size = 8; "
    code = code.replace("pipe.to(", before + "pipe.to(")
    # a prompt without its name would stand behind named arguments
    size = "height=64, width=64, " if ORACLES[name].sized else ""
    call = f"= pipe(num_inference_steps={ORACLES[name].steps}, {size}" + ORACLES[name].small
    if (load := ORACLES[name].load) is not None:
        kind = getattr(diffusers, pipeline)
        monkeypatch.setattr(kind, "from_pretrained", lambda *told, **options: load(kind, path, **options))
    if FAMILIES[name].control + FAMILIES[name].shown_frames:
        Image.new("RGB", (64, 64), "red").save(path / "reference.png")
    code = re.sub(r'= pipe\((\s*)(")?', lambda found: call + ('prompt="' if found[2] else ""), code)
    given: dict[str, Any] = {}
    exec(compile(code, pipeline, "exec"), given)
    assert given["image"].size == (64, 64) or not size
