"""The pages of docs/models/ say what the families' rows and facts say."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.render import model_pages
from difftrain.config.render.docs import PAGES
from difftrain.config.render.model_pages import CHINESE, ENGLISH, RELEASES, Language, releases_of
from difftrain.config.schema.families import takes
from difftrain.config.schema.sections import TrainConfig
from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
FLUX = (DOCS / "models" / "flux.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("key", "language"), [("models", ENGLISH), ("models_zh", CHINESE)], ids=["english", "chinese"])
def test_the_committed_page_is_what_is_rendered(key: str, language: Language) -> None:
    page = (DOCS / language.page).read_text(encoding="utf-8")
    assert page == PAGES[key](), f"python -m difftrain.config.render.docs {key} > docs/{language.page}"
    assert all(f"| `{name}` | {row.title} |" in page for name, row in FAMILIES.items())


def test_a_family_without_figures_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pages, "RELEASES", tmp_path)
    page = PAGES["models"]()
    assert all(page.count(f"| `{name}` |") == 3 for name in FAMILIES)
    assert page.count("not counted") == 7 * len(FAMILIES)


def test_what_is_said_of_releases_is_sound() -> None:
    for file in RELEASES.glob("*.json"):
        content = releases_of(file.stem)
        if file.stem not in FAMILIES:
            continue
        assert set(content) <= {"pages", "releases", "compared"} and content["releases"]
        for release in content["releases"].values():
            known = {"title", "licence", "size_hw", "frames", "size", "sizes", "counted"}
            assert set(release) <= known and ("size" in release) != ("sizes" in release) and release["title"]
            assert all(side % FAMILIES[file.stem].multiple == 0 for side in release["size_hw"])


def test_the_facts_of_flux_are_its_class() -> None:
    from difftrain.models.families.flux import Flux

    for part, kind in FAMILIES["flux"].parts.items():
        assert f"| `{part}` | `{kind.rpartition(':')[2]}` |" in FLUX
    clip, t5 = Flux.texts
    assert f"{clip.length} tokens; only `{clip.pooled}`" in FLUX and f"{t5.length} tokens (`t5_max_length`)" in FLUX
    assert Flux.shift.dynamic is not None
    first, last, low, high = Flux.shift.dynamic
    assert f"{low} at {first} and {high} at {last} |" in FLUX
    scales = Flux.vae_scales
    assert f"(z - {scales['shift_factor']}) x {scales['scaling_factor']}" in FLUX


def test_what_flux_is_said_to_refuse_is_refused() -> None:
    cfg = TrainConfig.model_validate({"model": {"family": "flux"}})
    for field in ("tread.share", "patch_masking.share", "model.t5_attention_mask", "model.num_layers", "model.clip_skip",
                  "model.fp8_frozen", "model.enable_uncond_text_dropout", "loss.text_recon_gamma"):  # fmt: skip
        assert not takes(cfg, field), field
    for field in ("model.guidance", "model.train_only", "repa.encoder", "flow.shift", "model.t5_max_length"):
        assert takes(cfg, field), field
