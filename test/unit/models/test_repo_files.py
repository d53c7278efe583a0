"""Which files of a repository an SD3 needs: all of its parts, what difftrain wrote beside them, and T5's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sd3 import config, loaded

from difftrain.models.weights import repo_files


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, parts = loaded(config({"loss": {"text_recon_gamma": 0.1}}))
    path = tmp_path_factory.mktemp("hub") / "model"
    return family.export(parts.root.named_parameters(), parts, "diffusers", path)


def test_an_export_comes_whole(export: Path) -> None:
    listing = sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())
    chosen, handed_on = repo_files.weights(listing, "", lambda name: (export / name).read_bytes())
    assert sorted(chosen) == [name for name in listing if name != "README.md"] and handed_on == ""
    assert "transformer_full/diffusion_pytorch_model.safetensors" in chosen and "difftrain.json" in chosen


def test_a_foreign_folder_has_no_such_files() -> None:
    index = json.dumps({"vae": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None]}).encode()
    listing = [
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "transformer_full/a.json",
    ]
    assert repo_files.weights(listing, "", lambda _: index)[0] == listing[:3]


@pytest.mark.parametrize(
    ("listing", "path", "chosen"),
    [
        (["tokenizer_3/tokenizer.json", "tokenizer_3/spiece.model", "a.txt"], "tokenizer_3",
         ["tokenizer_3/tokenizer.json", "tokenizer_3/spiece.model"]),
        (["spiece.model", "config.json"], "", ["spiece.model"]),
        (["here/any.json"], "here/any.json", ["here/any.json"]),
    ],
)  # fmt: skip
def test_a_vocabulary_of_t5_comes_alone(listing: list[str], path: str, chosen: list[str]) -> None:
    assert repo_files.t5_tokenizer(listing, path, lambda _: b"") == (chosen, path)


def test_what_has_no_vocabulary_of_t5_is_said() -> None:
    with pytest.raises(repo_files.Unfit, match=r"tokenizer\.json .*spiece\.model"):
        repo_files.t5_tokenizer(["vocab.json"], "", lambda _: b"")
