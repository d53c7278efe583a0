"""Adapters in every family: nothing at first, the only thing that is trained, and counted as it is run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fetched
import pytest
import torch
from families import Tiny, bucket_of, config, exported, loaded, made, trained_once
from refusals import is_about
from safetensors.torch import load_file, save

from difftrain.adapters import KINDS, adapted_layers, is_adapter, plain_name
from difftrain.cli import main
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault
from difftrain.models import adapted as adapted_models
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.adapter_files import AdapterChoice, merge_adapter
from difftrain.models.weights.adapter_layouts import AdapterLayouts
from difftrain.models.weights.peft_merge import fuse_by_peft, kind_in, merge_by_peft

# layers whose outputs are computed and thrown away: their gradient is there, and exactly zero
SILENT = dict.fromkeys(
    ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), r"\.1\.attn\.(add_q_proj|norm_added_q)\."
) | {"sd3": r"\.2\.attn\.add_q_proj\."}
LORA = {"type": "lora", "rank": 2}


def adapted(name: str, adapter: dict[str, Any], **model: Any) -> Tiny:
    return loaded(config(name, {"adapter": adapter}, **model))


def step(tiny: Tiny, updates: int = 2) -> None:
    """Train what is trained; the first update alone would leave a factor of a product without a gradient."""
    weights = [each for each in tiny.parts.root.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0)
    for _ in range(updates):
        optimizer.zero_grad(set_to_none=True)
        tiny.loss().backward()
        assert all(each.grad is not None for each in weights), "an adapter stands where no loss reaches"
        optimizer.step()


def test_an_adapter_is_nothing_at_first_and_then_all_that_moves(name: str, tiny: Tiny) -> None:
    own = adapted(name, LORA)
    plain = loaded(config(name))
    trained_once(plain)  # a fresh model's zeros would silence adapters behind them
    bases = {key: each for key, each in own.parts.root.named_parameters() if not is_adapter(key)}
    for key, value in plain.parts.root.named_parameters():
        bases[inside(own, key)].data.copy_(value.detach())
    assert own.parts.base == set(bases) and not any(each.requires_grad for each in bases.values())

    # --- nothing at first, to the bit
    inputs = own.inputs()
    with torch.no_grad():
        before = own.family.forward(own.parts.root, inputs)[0]
        assert torch.equal(before, plain.family.forward(plain.parts.root, inputs)[0])

    # --- then it is all that moves, every weight of it
    at_first = {key: each.detach().clone() for key, each in own.parts.root.named_parameters()}
    step(own)
    moved = {key for key, each in own.parts.root.named_parameters() if not torch.equal(each, at_first[key])}
    silent = re.compile(SILENT.get(name, "nothing"))  # computed and thrown away
    assert {key for key in moved if not silent.search(key)} == {
        key for key in at_first if is_adapter(key) and not silent.search(key)
    }


def inside(tiny: Tiny, name: str) -> str:
    """Return the name of a weight beside adapters."""
    names = {plain_name(key): key for key, _ in tiny.parts.root.named_parameters()}
    return names[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.nightly)])
def test_every_kind_begins_as_nothing_and_learns(name: str, kind: str) -> None:
    own, plain = adapted(name, {"type": kind} | ({} if kind == "ia3" else {"rank": 2})), loaded(config(name))
    inputs = plain.inputs()
    with torch.no_grad():
        made_first = own.family.forward(own.parts.root, inputs)[0]
        torch.testing.assert_close(made_first, plain.family.forward(plain.parts.root, inputs)[0], rtol=1e-5, atol=1e-5)
    at_first = {key: each.detach().clone() for key, each in own.parts.root.named_parameters() if is_adapter(key)}
    for each in own.parts.root.parameters():  # a fresh model's zeros would silence what is before them
        if not each.any() and not each.requires_grad:
            each.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    step(own)
    now = dict(own.parts.root.named_parameters())
    assert at_first and all(not torch.equal(now[key], value) for key, value in at_first.items())


def test_the_same_seed_draws_the_same_adapter_and_another_another() -> None:
    first, again, other = (adapted("flux", LORA), adapted("flux", LORA), None)
    other = loaded(config("flux", {"adapter": LORA, "training": {"seed": 2}}))
    a, b, c = (
        {key: each for key, each in tiny.parts.root.named_parameters() if ".lora_A." in key}
        for tiny in (first, again, other)
    )
    assert a and all(torch.equal(a[key], b[key]) and not torch.equal(a[key], c[key]) for key in a)


def test_encoders_that_are_trained_get_adapters_too() -> None:
    own = adapted("sdxl", LORA, train_text_encoder=True)
    parts = {key.partition(".")[0] for key, each in own.parts.root.named_parameters() if each.requires_grad}
    assert parts == {"unet", "text_encoder_1", "text_encoder_2"}
    layers = adapted_layers(own.parts.root.get_submodule("text_encoder_1"))
    depth = own.parts.root.get_submodule("text_encoder_1").config.num_hidden_layers
    assert not any(f"layers.{depth - 1}." in layer for layer in layers), (
        "the last layer is not read: nothing is trained there"
    )


def test_words_choose_layers_and_their_ranks() -> None:
    section = {
        "type": "lora",
        "rank": 4,
        "target_modules": ("to_q", r"transformer_blocks\.\d+\.attn\.to_v"),
        "exclude_modules": ("transformer_blocks.0.attn.to_q",),
        "rank_pattern": {"to_v": 2},
    }
    own = adapted("flux", section)
    layers = adapted_layers(own.net)
    assert "transformer_blocks.0.attn.to_q" not in layers
    assert {layer.rpartition(".")[2] for layer in layers} == {"to_q", "to_v"}
    assert {layer.rpartition(".")[2] for layer in layers if layer.startswith("single_")} == {"to_q"}
    ranks = {name: module.r["default"] for name, module in layers.items()}
    assert all(rank == (2 if name.endswith("to_v") else 4) for name, rank in ranks.items())
    assert all(module.scaling["default"] == 1.0 for module in layers.values()), "alpha is the rank of each layer"


@pytest.mark.parametrize(
    ("adapter", "field", "says"),
    [
        ({"target_modules": ("to_qq",)}, "target_modules", "to_q"),
        ({"exclude_modules": ("nowhere",)}, "exclude_modules", "nowhere"),
        ({"rank_pattern": {"norm": 2}}, "rank_pattern", "norm"),
        ({"rank": 4096}, "rank", "4096"),
        ({"type": "oft", "rank": 7}, "rank", "7"),
        ({"exclude_modules": (".*",)}, "exclude_modules", "no layer"),
    ],
)
def test_what_no_layer_has_is_named_before_a_weight_is_read(adapter: dict[str, Any], field: str, says: str) -> None:
    family = made(config("flux", {"adapter": LORA | adapter}))
    with pytest.raises(ConfigFault) as refused:
        family.load(meta=True)
    (fault,) = refused.value.faults
    assert field in fault.where and says in f"{fault.what} {fault.remedy}"


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_frozen_weights_need_no_gradient_and_are_not_counted(name: str) -> None:
    whole, own = made(config(name)), made(config(name, {"adapter": LORA}))
    bucket = bucket_of(name)
    full, alone = (each.flops_per_sample(each.load(meta=True), bucket) for each in (whole, own))
    assert 0.6 < alone / full < 0.85


def test_every_family_that_trains_names_its_layers() -> None:
    for name in FAMILIES:
        family = made(config(name, {"adapter": LORA}))
        net = family.load(meta=True).root.get_submodule(FAMILIES[name].denoiser)
        assert adapted_layers(net), name


# ---------------------------------------------------------------- from files and to them


@pytest.fixture(scope="module", params=["flux", "sdxl"])
def exported_lora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    """A LoRA whose weights are no zeros, as a run exports it: alpha is no rank, and one layer has another rank."""
    name = request.param
    section = LORA | {"alpha": 3.0, "rank_pattern": {"to_v": 3}}
    own = adapted(name, section, **({"train_text_encoder": True} if name == "sdxl" else {}))
    trained_once(own)
    folder = tmp_path_factory.mktemp(name) / "mine"
    return own, exported(own, folder)


def test_an_export_goes_on_as_it_was(exported_lora: tuple[Tiny, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own, folder = exported_lora
    reads: list[Path] = []
    read = adapted_models.read_adapter
    monkeypatch.setattr(
        adapted_models, "read_adapter", lambda choice, family: reads.append(choice.path) or read(choice, family)
    )
    model = {"train_text_encoder": True} if own.family.name == "sdxl" else {}
    section = LORA | {"alpha": 3.0, "rank_pattern": {"to_v": 3}, "init_from_existing": str(folder)}
    again = adapted(own.family.name, section, **model)
    assert reads == [folder], "once, whatever number of parts has an adapter"
    stored = dict(own.parts.root.named_parameters())
    names = [key for key in stored if is_adapter(key)]
    assert names and all(torch.equal(again.parts.root.get_parameter(key), stored[key]) for key in names)

    # --- with another alpha the product is the same
    other = adapted(own.family.name, section | {"alpha": 6.0}, **model)
    with torch.no_grad():
        for key, value in own.parts.root.named_parameters():
            if not is_adapter(key):
                other.parts.root.get_parameter(key).copy_(value)
        inputs = own.inputs()
        made = [each.family.forward(each.parts.root, inputs)[0] for each in (own, other)]
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)


def test_what_is_fused_is_what_was_beside(exported_lora: tuple[Tiny, Path]) -> None:
    own, folder = exported_lora
    model = {"train_text_encoder": True} if own.family.name == "sdxl" else {}
    plain = adapted(own.family.name, LORA, **model)
    fused = adapted(own.family.name, LORA | {"fuse_adapters": (f"{folder}:0.5", f"{folder}:0.5")}, **model)
    with torch.no_grad():  # the export's own base is another: its zeros were made into others
        for key, value in plain.parts.root.named_parameters():
            if not is_adapter(key):
                own.parts.root.get_parameter(key).copy_(value)
        inputs = own.inputs()
        made = [each.family.forward(each.parts.root, inputs)[0] for each in (own, fused)]
        assert not torch.allclose(made[0], plain.family.forward(plain.parts.root, inputs)[0])
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    assert fused.parts.base_fingerprints != plain.parts.base_fingerprints


@pytest.mark.parametrize(("change", "says"), [({"rank": 4}, "rank 2"), ({"target_modules": ("to_q",)}, "gets none")])
def test_an_adapter_of_other_layers_or_ranks_is_named(
    exported_lora: tuple[Tiny, Path], change: dict[str, Any], says: str
) -> None:
    own, folder = exported_lora
    with pytest.raises(ConfigFault) as refused:
        adapted(own.family.name, LORA | change | {"init_from_existing": str(folder)})
    (fault,) = refused.value.faults
    assert fault.where == option("adapter.init_from_existing") and says in fault.what and str(folder) in fault.what


def torn(folder: Path) -> bytes:
    """Return a file of an adapter without its last tensor."""
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(sorted(tensors)[-1])
    return save(tensors)


@pytest.mark.parametrize("decompose", [-1, 4])
@pytest.mark.parametrize("name", ["sd1", "sdxl", "wan"])
def test_lycoris_reads_lokr_as_it_was_trained(
    name: str, decompose: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's product, by LyCORIS's own modules, is what PEFT adds; of Flux, whose file fuses layers, there is none."""
    monkeypatch.syspath_prepend(fetched.lycoris())
    monkeypatch.setitem(sys.modules, "toml", SimpleNamespace())  # of its presets, which nobody asks for here
    from lycoris.modules import get_module, make_module

    section = {"type": "lokr", "rank": 2, "alpha": 3.0, "decompose_factor": decompose}
    own = adapted(name, section, **({"train_text_encoder": True} if name == "sdxl" else {}))
    trained_once(own)
    folder = exported(own, tmp_path / "mine")
    file = folder / ("mine_comfyui.safetensors" if name == "wan" else "mine.safetensors")
    tensors, layouts = load_file(file), AdapterLayouts(own.family)
    layers = {}
    for part in own.family.in_root:
        home = own.family.folder(part)
        for layer, module in adapted_layers(own.parts.root.get_submodule(part)).items():
            layers[layouts.own_name(home, layouts.layer(home, layer))] = module
    assert layers.keys() == {key.rpartition(".")[0] for key in tensors} and len(layers) > 10
    for stem, module in layers.items():
        base: Any = module.base_layer
        kind, params = get_module(tensors, stem)
        made = make_module(kind, params, stem.replace(".", "_"), base)
        with torch.no_grad():
            theirs, ours = made.get_weight(base.weight.shape), module.get_delta_weight("default")
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-7, msg=stem)
    flux = adapted("flux", section)
    assert sorted(path.name for path in exported(flux, tmp_path / "flux").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["dora", "oft", "lokr", "ia3"])
def test_other_kinds_are_exported_as_peft_reads_them_and_merged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    own = adapted("flux", {"type": kind} | ({} if kind == "ia3" else {"rank": 2}))
    trained_once(own)
    for key, value in own.parts.root.named_parameters():
        if ".ia3_l." in key:  # a factor of 1 for all outputs changes nothing
            value.data.add_(torch.linspace(-0.5, 0.5, value.numel()).view(value.shape))
    plain = loaded(config("flux"))
    with torch.no_grad():
        for key, value in plain.parts.root.named_parameters():
            value.copy_(own.parts.root.get_parameter(inside(own, key)))
        inputs = own.inputs()
        expected = own.family.forward(own.parts.root, inputs)[0]
        folder = exported(own, tmp_path / "mine")
        before, keys = plain.family.forward(plain.parts.root, inputs)[0], list(plain.parts.root.state_dict())

        # --- merged: the model's own layers, with other weights; and nothing where it does not fit
        kept = {key: value.clone() for key, value in plain.parts.root.state_dict().items()}
        where = {plain.family.folder(plain.family.denoiser): plain.net}
        assert kind_in(folder)
        if kind in ("oft", "ia3"):
            with pytest.raises(ConfigFault) as refused:
                merge_by_peft(AdapterChoice(folder, 0.5, "--adapter"), plain.family, where)
            assert is_about(refused.value.faults[0], "--adapter", "0.5")
        (shutil.copytree(folder, tmp_path / "torn") / "adapter_model.safetensors").write_bytes(torn(folder))
        with pytest.raises(ConfigFault) as refused:
            merge_by_peft(AdapterChoice(tmp_path / "torn", 1.0, "--adapter"), plain.family, where)
        assert is_about(refused.value.faults[0], "--adapter", tmp_path / "torn")
        assert all(torch.equal(value, kept[key]) for key, value in plain.parts.root.state_dict().items())
        merge_by_peft(AdapterChoice(folder, 1.0, "--adapter"), plain.family, where)
        after = plain.family.forward(plain.parts.root, inputs)[0]
        assert list(plain.parts.root.state_dict()) == keys and not torch.allclose(after, before, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
        merged = {key: value.clone() for key, value in plain.net.state_dict().items()}
        plain.parts.root.load_state_dict(kept)

        # --- into a model's files, of all parts and of the denoiser alone, whose layers are fused there
        for layout in ("diffusers_safetensors", "safetensors"):
            base = exported(plain, tmp_path / f"base-{layout}", layout)
            words = [f"--adapter={folder}", f"--merge_into={base}", f"--output={tmp_path / f'out-{layout}'}"]
            assert main(["convert", *words]) == 0
            out = Path(capsys.readouterr().out.strip())
            plain.net.load_state_dict(merged)
            like = exported(plain, tmp_path / f"like-{layout}", layout)
            plain.parts.root.load_state_dict(kept)
            for one in [like] if like.is_file() else sorted(like.rglob("*.safetensors")):
                made, wanted = load_file(out if like.is_file() else out / one.relative_to(like)), load_file(one)
                assert made.keys() == wanted.keys()
                for key, value in wanted.items():
                    torch.testing.assert_close(made[key], value, rtol=1e-5, atol=1e-6, msg=f"{layout} {key}")
        assert (
            main(["convert", f"--adapter={tmp_path / 'torn'}", f"--merge_into={base}", f"--output={tmp_path}/x"]) == 2
        )
        converted = main(["convert", f"--adapter={folder}", "--family=flux", "--to=comfyui", f"--output={tmp_path}/x"])
        assert converted == (0 if kind == "dora" else 2)
        assert kind == "dora" or "adapter_model.safetensors" in capsys.readouterr().err

        # --- DoRA from every file of its folder, as PEFT merges it; and training goes on from one
        for file in sorted(folder.glob("*.safetensors")) if kind == "dora" else ():
            merge_adapter(AdapterChoice(file, 1.0, "--adapter"), plain.family, where)
            for key, value in plain.net.state_dict().items():
                torch.testing.assert_close(value, merged[key], rtol=1e-5, atol=1e-6, msg=f"{file.name} {key}")
            plain.parts.root.load_state_dict(kept)
            again = adapted("flux", {"type": kind, "rank": 2, "init_from_existing": str(file)})
            for key, value in again.parts.root.named_parameters():
                assert torch.equal(value, own.parts.root.get_parameter(key)), (file.name, key)

        # --- into the base of a run that trains another
        beside, fused = (adapted("flux", LORA | more) for more in ({}, {"fuse_adapters": (str(folder),)}))
        fuse_by_peft(AdapterChoice(folder, 1.0, "--adapter"), beside.family, {"transformer": beside.net})
        assert beside.parts.base and all(
            torch.equal(beside.parts.root.get_parameter(key), fused.parts.root.get_parameter(key)) for key in beside.parts.base)  # fmt: skip

        # --- and read by PEFT
        read = PeftModel.from_pretrained(plain.net, folder)
        assert set(adapted_layers(read.get_base_model())) == set(adapted_layers(own.net))
        torch.testing.assert_close(plain.family.forward(plain.parts.root, inputs)[0], expected, rtol=1e-5, atol=1e-5)
