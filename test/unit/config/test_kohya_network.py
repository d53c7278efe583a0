"""kohya's LoRA flags become fields of [adapter]; what is not built is refused by its name."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault, RunFacts
from difftrain.models.metadata import kohya_keys

MODULE = "--network_module=networks.lora"


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "pictures").mkdir()
    return [
        "--init_from_config=tiny",
        f"--train_data_dir={tmp_path}/pictures",
        "--resolution=64,64",
        f"--output_dir={tmp_path}/o",
    ]


def config(line: list[str], *words: str) -> TrainConfig:
    return parse([*line, *words]).config


def faults(line: list[str], *words: str) -> dict[str, str]:
    with pytest.raises(ConfigFault) as refused:
        parse([*line, *words])
    return {fault.where: f"{fault.what} {fault.remedy}" for fault in refused.value.faults}


@pytest.mark.flags("network_module", "network_train_unet_only")
def test_defaults_are_kohyas(line: list[str]) -> None:
    cfg = config(line, MODULE)
    assert (cfg.adapter.type, cfg.adapter.rank, cfg.adapter.alpha) == ("lora", 4, 1.0)
    assert cfg.model.train_text_encoder, "his scripts train text encoders too"
    assert not config(line, MODULE, "--network_train_unet_only").model.train_text_encoder
    assert config(line).adapter.type is None


@pytest.mark.flags("network_dim", "network_alpha", "network_dropout", "network_train_text_encoder_only")
def test_ranks_dropout_and_rates(line: list[str]) -> None:
    words = [
        "--network_dim=8",
        "--network_alpha=2",
        "--network_dropout=0.25",
        "--unet_lr=1e-3",
        "--text_encoder_lr",
        "1e-4",
        "2e-4",
    ]
    cfg = config(line, MODULE, *words)
    assert (cfg.adapter.rank, cfg.adapter.alpha, cfg.adapter.dropout) == (8, 2.0, 0.25)
    assert (cfg.optimizer.unet_lr, tuple(cfg.optimizer.text_encoder_lr)) == (1e-3, (1e-4, 2e-4))
    assert config(line, MODULE, "--network_dim=8", "--network_alpha=0").adapter.alpha == 8, "0 is the rank"
    assert config(line, MODULE, "--network_train_text_encoder_only").optimizer.unet_lr == 0


@pytest.mark.flags("network_args")
def test_convolutions_and_blocks(line: list[str]) -> None:
    cfg = config(line, MODULE, "--network_args", "conv_dim=2", "conv_alpha=0.5")
    assert 2 in cfg.adapter.rank_pattern.values() and 0.5 in cfg.adapter.alpha_pattern.values()
    assert "to_q" in cfg.adapter.target_modules and "q_proj" in cfg.adapter.target_modules
    alone = config(line, MODULE, "--network_train_unet_only", "--network_args", "conv_dim=2")
    assert "q_proj" not in alone.adapter.target_modules, "no layer of the UNet is called so"
    dims = ",".join(["0"] * 11 + ["8"] + ["3"] * 11)
    cfg = config(line, MODULE, "--network_args", f"block_dims={dims}")
    ranks = {pattern: rank for pattern, rank in cfg.adapter.rank_pattern.items()}
    assert {rank: "mid_block" in pattern for pattern, rank in ranks.items()} == {8: True, 3: False}
    (excluded,) = cfg.adapter.exclude_modules
    assert re.fullmatch(excluded, "down_blocks.1.attentions.0.proj_in") and not re.fullmatch(
        excluded, "mid_block.attentions.0.proj_in"
    )


def test_a_headers_words_are_those_that_make_the_same_adapter(line: list[str]) -> None:
    """What files say as ss_network_args, given as --network_args again, and what they say beside it."""
    dims = ",".join(["0"] * 11 + ["8"] + ["3"] * 11)
    for words in (
        ["conv_dim=2", "conv_alpha=0.5"],
        [f"block_dims={dims}"],
        ["loraplus_lr_ratio=16", "loraplus_unet_lr_ratio=2.5"],
        [],
    ):
        lora = [MODULE, "--network_dim=4"]
        more = ["--network_dropout=0.25", "--scale_weight_norms=1"]
        cfg = config(line, *lora, *more, *(["--network_args", *words] if words else []))
        stored = kohya_keys(cfg, RunFacts(1, 1, 2, 1, 2, 0.0), 0.0, "sdxl", {})
        found = json.loads(stored.get("ss_network_args", "{}"))
        assert found.keys() >= {word.partition("=")[0] for word in words} and bool(found) == bool(words)
        again = [f"{key}={value}" for key, value in found.items()]
        same = config(line, *lora, *more, *(["--network_args", *again] if again else []))
        assert same.adapter == cfg.adapter
        assert (stored["ss_network_dropout"], stored["ss_scale_weight_norms"]) == ("0.25", "1.0")
    plain = kohya_keys(config(line), RunFacts(1, 1, 2, 1, 2, 0.0), 0.0, "sdxl", {})
    assert not any("network" in key for key in plain)


def test_lycoris_algorithms_are_our_types(line: list[str]) -> None:
    for algorithm, kind in (("lora", "lora"), ("locon", "lora"), ("lokr", "lokr"), ("ia3", "ia3")):
        words = ["--network_module=lycoris.kohya", "--network_args", f"algo={algorithm}"]
        assert config(line, *words).adapter.type == kind


@pytest.mark.flags("base_weights", "base_weights_multiplier")
def test_adapters_that_are_added_first(line: list[str], tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    words = ["--base_weights", f"{tmp_path}/a", f"{tmp_path}/b", "--base_weights_multiplier", "0.5"]
    assert config(line, MODULE, *words).adapter.fuse_adapters == (f"{tmp_path}/a:0.5", f"{tmp_path}/b:1.0")


@pytest.mark.flags("fp8_base", "fp8_base_unet")
def test_an_fp8_base_is_one_of_which_nothing_wide_is_kept(line: list[str], tmp_path: Path) -> None:
    for flag in ("--fp8_base", "--fp8_base_unet"):
        model = config(line, MODULE, flag).model
        assert (model.base_dtype, model.fp8_frozen) == ("fp8", None)
    assert (
        config(
            line, "--fp8_base", "--learning_rate=0", "--train_text_encoder", "--learning_rate_te1=1e-5"
        ).model.fp8_frozen
        == "all"
    )
    (tmp_path / "a").touch()
    added = config(line, MODULE, "--fp8_base", "--base_weights", f"{tmp_path}/a").model
    assert (added.base_dtype, added.fp8_frozen) == (None, "all"), "what is added to must be wide"


def write(path: Path, rows: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, data = dict[str, Any](), b""
    for name, (dtype, shape, raw) in rows.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [("F32", struct.pack("<f", 1.5)), ("F16", struct.pack("<e", 1.5)), ("BF16", struct.pack("<f", 1.5)[2:])],
)
@pytest.mark.flags("network_weights", "dim_from_weights")
def test_rank_and_alpha_of_a_file(line: list[str], tmp_path: Path, dtype: str, raw: bytes) -> None:
    rows = {"lora_unet_x.lora_down.weight": ("F16", [6, 4], bytes(48)), "lora_unet_x.alpha": (dtype, [], raw)}
    file = write(tmp_path / "lora.safetensors", rows)
    cfg = config(line, MODULE, f"--network_weights={file}", "--dim_from_weights")
    assert (cfg.adapter.rank, cfg.adapter.alpha, cfg.adapter.init_from_existing) == (6, 1.5, str(file))


def test_a_file_of_several_ranks_or_none_is_named(line: list[str], tmp_path: Path) -> None:
    rows = {f"{name}.lora_down.weight": ("F16", [rank, 4], bytes(8 * rank)) for name, rank in (("a", 2), ("b", 3))}
    file = write(tmp_path / "lora.safetensors", rows)
    said = faults(line, MODULE, f"--network_weights={file}", "--dim_from_weights")
    assert "2, 3" in said["--dim_from_weights"]
    (tmp_path / "torn.safetensors").write_bytes(file.read_bytes()[:20])
    said = faults(line, MODULE, f"--network_weights={tmp_path}/torn.safetensors", "--dim_from_weights")
    assert "torn.safetensors" in said["--dim_from_weights"]
    assert "--network_weights" in faults(line, MODULE, "--dim_from_weights")["--dim_from_weights"]


@pytest.mark.parametrize(
    ("words", "where", "says"),
    [
        (["--network_module=networks.dylora"], "--network_module", "DyLoRA"),
        (["--network_module=no.such"], "--network_module", "no.such"),
        (["--network_dim=4"], "--network_dim", "--network_module"),
        ([MODULE, "--network_args", "loraplus_lr_ratio=x"], "--network_args", "loraplus_lr_ratio"),
        (["--network_module=lycoris.kohya", "--network_args", "loraplus_lr_ratio=16"], "--network_args", "loraplus_lr_ratio"),
        (["--network_module=lycoris.kohya", "--network_args", "algo=lokr", "--scale_weight_norms=1"], "--scale_weight_norms", "lokr"),
        ([MODULE, "--network_args", "conv_dim"], "--network_args", "key=value"),
        ([MODULE, "--network_args", "conv_alpha=1"], "--network_args", "conv_dim"),
        ([MODULE, "--network_args", "block_dims=1,2"], "--network_args", "23"),
        (["--network_module=lycoris.kohya", "--network_args", "algo=loha"], "--network_args", "loha"),
        ([MODULE, "--network_train_unet_only", "--network_train_text_encoder_only"], "--network_train_text_encoder_only", "--network_train_unet_only"),
        ([MODULE, "--scale_weight_norms=0"], "--scale_weight_norms", "0"),
        ([MODULE, "--network_weights=/no/such"], "--network_weights", "/no/such"),
        ([MODULE, "--block_lr=" + ",".join(["1e-4"] * 23)], "--block_lr", "adapter"),
    ],
)  # fmt: skip
def test_what_is_not_built_or_contradicts_is_named(line: list[str], words: list[str], where: str, says: str) -> None:
    said = faults(line, *words)
    assert where in said and says in said[where], said
