"""`difftrain convert`: adapters between layouts, into a model, and out of two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import assert_same, pairs_of, read_back, written
from families import config, exported, loaded
from refusals import is_about
from safetensors.torch import load_file, save_file

from difftrain.cli import main
from difftrain.cli.convert import read
from difftrain.cli.generate import adapters_of
from difftrain.contracts import ConfigFault
from difftrain.models.weights.adapter_files import AdapterChoice, merge_adapter
from difftrain.models.weights.adapter_layouts import LoraPair


def faults(*words: str) -> str:
    with pytest.raises(ConfigFault) as caught:
        read(list(words))
    return str(caught.value)


def test_what_contradicts_or_is_missing_is_named_before_anything_is_read(tmp_path: Path) -> None:
    some, out = f"--adapter={tmp_path / 'a.safetensors'}", f"--output={tmp_path / 'b'}"
    model = tmp_path / "model"
    model.mkdir()
    (model / "notes.txt").write_text("mine")
    expected = {
        (): ("--output", "--adapter"),
        (some, out, "--to=a1111"): ("--to", "a1111", "kohya"),
        (some, out, "--rank=4"): ("--rank", "--extract_from"),
        (some, out, some): ("--adapter", "--merge_into"),
        (some, out, f"--merge_into={model}", "--to=peft"): ("--to", "--merge_into"),
        (some, out, f"--merge_into={tmp_path / 'nowhere'}"): ("--merge_into", "nowhere"),
        (f"--extract_from={model}", out): ("--base", "--rank"),
        (f"--extract_from={model}", f"--base={model}", "--rank=0", out): ("--rank", "0"),
        (some, f"--extract_from={model}", f"--base={model}", "--rank=1", out): ("--extract_from", "--adapter"),
        (some, f"--output={model}"): ("--output", str(model)),
    }
    for words, facts in expected.items():
        text = faults(*words)
        assert all(fact in text for fact in facts), (words, text)


@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.nightly)])
def test_an_adapter_goes_through_every_layout_and_comes_back_to_the_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Family and size are found from the file: from its header, and where it has none from the names of its layers."""
    tiny = loaded(config(name))
    pairs = pairs_of(tiny)
    folder = written(tiny, pairs, tmp_path / "start", metadata=tiny.family.metadata("start", 0.0))
    layouts = ["comfyui", "peft", "diffusers", *(["kohya"] if tiny.family.lora.kohya else []), "comfyui"]
    at = folder
    for number, layout in enumerate(layouts):
        assert main(["convert", f"--adapter={at}", f"--to={layout}", f"--output={tmp_path / f'{number}'}"]) == 0
        at = Path(capsys.readouterr().out.strip())
        assert at == tmp_path / (f"{number}" if layout == "peft" else f"{number}.safetensors")
        assert_same(pairs, read_back(tiny, at))
    assert main(["convert", f"--adapter={at}", f"--output={tmp_path / 'every'}", "--save_precision=bf16"]) == 0
    assert {file.name for file in (tmp_path / "every").glob("*.*")} == {
        file.name.replace("mine", "every") for file in folder.glob("*.*")
    }
    assert {pair.a.dtype for pair in read_back(tiny, tmp_path / "every").values()} == {torch.bfloat16}


def test_a_layout_that_a_family_has_not_and_a_file_of_no_family_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = loaded(config("qwen_image"))
    folder = written(tiny, pairs_of(tiny), tmp_path / "start", metadata=tiny.family.metadata("start", 0.0))
    assert main(["convert", f"--adapter={folder}", "--to=kohya", f"--output={tmp_path / 'out'}"]) == 2
    text = capsys.readouterr().err
    assert "--to" in text and "kohya" in text and "comfyui" in text
    save_file({"nowhere.lora_A.weight": torch.ones(2, 4), "nowhere.lora_B.weight": torch.ones(4, 2)},
              tmp_path / "odd.safetensors")  # fmt: skip
    assert main(["convert", f"--adapter={tmp_path / 'odd.safetensors'}", f"--output={tmp_path / 'out'}"]) == 2
    assert "odd.safetensors" in (text := capsys.readouterr().err) and "--family" in text
    assert not list(tmp_path.glob("out*"))


def test_others_adapter_of_a_released_size_needs_no_model_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As kohya's scripts write one of Flux.1 with CLIP: fused layers are parted by the release's widths."""
    widths = {
        "lora_unet_double_blocks_18_img_attn_proj": (3072, 3072),
        "lora_unet_single_blocks_37_linear1": (21504, 3072),
        "lora_te1_text_model_encoder_layers_11_mlp_fc1": (3072, 768),
    }
    tensors = {}
    for name, (out, into) in widths.items():
        tensors |= {f"{name}.lora_down.weight": torch.randn(1, into), f"{name}.lora_up.weight": torch.randn(out, 1)}
        tensors[f"{name}.alpha"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "theirs.safetensors")
    line = ["convert", f"--adapter={tmp_path / 'theirs.safetensors'}", "--to=diffusers"]
    assert main([*line, f"--output={tmp_path / 'ours'}"]) == 0
    made = load_file(capsys.readouterr().out.strip())
    fused = [f"attn.to_{leaf}" for leaf in "qkv"] + ["proj_mlp"]
    ups = [made.pop(f"transformer.single_transformer_blocks.37.{leaf}.lora_B.weight") for leaf in fused]
    assert torch.equal(torch.cat(ups), tensors["lora_unet_single_blocks_37_linear1.lora_up.weight"])
    assert {key.rpartition(".lora_")[0] for key in made} == {
        "transformer.transformer_blocks.18.attn.to_out.0",
        "text_encoder.text_model.encoder.layers.11.mlp.fc1",
        *(f"transformer.single_transformer_blocks.37.{leaf}" for leaf in fused),
    }
    assert main([*line, "--family=qwen_image", f"--output={tmp_path / 'none'}"]) == 2
    assert "theirs.safetensors" in capsys.readouterr().err and not list(tmp_path.glob("none*"))


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_weights_with_an_adapter_merged_are_those_that_are_generated_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder with all parts, and of a file with the denoiser alone, which keeps its names."""
    tiny = loaded(config(name))
    pairs = pairs_of(tiny, texts=bool(tiny.family.lora.kohya))
    adapter = written(tiny, pairs, tmp_path / "adapter")
    model = exported(tiny, tmp_path / "model")
    file = exported(tiny, tmp_path / "file", "safetensors")
    modules = {tiny.family.folder(part): tiny.parts.root.get_submodule(part) if part in tiny.family.in_root
               else tiny.parts.frozen[part] for part in tiny.family.parts}  # fmt: skip
    merge_adapter(AdapterChoice(adapter, -0.5, "--adapter"), tiny.family, modules)
    for base, layout in ((model, "diffusers_safetensors"), (file, "safetensors")):
        ours = exported(tiny, tmp_path / "ours", layout)
        line = ["convert", f"--adapter={adapter}:-0.5", f"--merge_into={base}", f"--output={tmp_path / 'merged'}"]
        assert main(line) == 0  # in the layout of its base
        theirs = Path(capsys.readouterr().out.strip())
        for one in [ours] if ours.is_file() else sorted(ours.rglob("*.safetensors")):
            other = theirs if ours.is_file() else theirs / one.relative_to(ours)
            expected, made = load_file(one), load_file(other)
            assert expected.keys() == made.keys()
            for key, value in expected.items():
                torch.testing.assert_close(made[key], value, atol=1e-6, rtol=1e-6, msg=f"{other.name} {key}")


def test_a_folder_is_not_named_like_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = loaded(config("sd3"))
    adapter = written(tiny, pairs_of(tiny, texts=False), tmp_path / "adapter")
    base, out = exported(tiny, tmp_path / "base"), tmp_path / "merged.safetensors"
    assert main(["convert", f"--adapter={adapter}", f"--merge_into={base}", f"--output={out}"]) == 2
    assert "--output" in capsys.readouterr().err and not out.exists()


def test_an_adapter_is_taken_out_of_the_model_that_it_was_merged_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = loaded(config("flux"))
    pairs = {key: LoraPair([], pair.a, pair.b, pair.alpha) for key, pair in pairs_of(tiny, texts=False).items()}
    base = exported(tiny, tmp_path / "base")
    adapter = written(tiny, pairs, tmp_path / "adapter")
    main(["convert", f"--adapter={adapter}", f"--merge_into={base}", f"--output={tmp_path / 'tuned'}"])
    line = ["convert", f"--extract_from={tmp_path / 'tuned'}", f"--base={base}", f"--output={tmp_path / 'lora'}"]
    assert main([*line, "--rank=4", "--device=cpu"]) == 0
    assert "100.0%" in capsys.readouterr().err
    recovered = read_back(tiny, tmp_path / "lora")
    assert recovered.keys() == pairs.keys()
    for key, pair in pairs.items():
        shape = (pair.b.shape[0], pair.a.shape[1])
        torch.testing.assert_close(recovered[key].delta(shape), pair.delta(shape), atol=1e-4, rtol=1e-4)
        assert recovered[key].alpha == 4
    assert main([*line, "--rank=1", "--to=peft"]) == 0
    assert "100.0% of the squared" not in capsys.readouterr().err
    assert main([*line[:1], f"--extract_from={base}", *line[2:], "--rank=2"]) == 2
    assert "--extract_from" in capsys.readouterr().err


def test_a_scale_stands_behind_the_last_colon_of_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a:2").touch()
    (tmp_path / "b").touch()
    words = [f"{tmp_path}/a:2", f"{tmp_path}/a:2:0.5", f"{tmp_path}/b:0.25", "owner/name"]
    assert [(str(choice.path), choice.scale) for choice in adapters_of(words)] == [
        (words[0], 1.0), (words[0], 0.5), (f"{tmp_path}/b", 0.25), ("owner/name", 1.0),
    ]  # fmt: skip
    with pytest.raises(ConfigFault) as refused:
        adapters_of([f"{tmp_path}/b:x"])
    assert is_about(refused.value.faults[0], "--adapter", f"{tmp_path}/b:x")
