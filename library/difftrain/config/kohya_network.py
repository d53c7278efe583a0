"""kohya's LoRA flags, as fields of [adapter]: --network_module with its dims, alphas and arguments, of the UNet of SDXL.

Source: the flags and the `--network_args` of kohya's networks.lora. Blocks are numbered as --block_lr numbers them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.paths import expanded
from difftrain.models.row import CLIP_TARGETS, UNET_TARGETS

if TYPE_CHECKING:
    from difftrain.config.resolve import Resolution
    from difftrain.config.schema.adapter import AdapterSection

MODULE = "?adapter.module"
OFF_AT_ZERO = (MODULE, "?adapter.dim")  # where 0 or nothing stands in a file of settings, no adapter is asked for
_FP8 = "model.fp8_frozen"
_DIM, _ALPHA = 4, 1.0  # where nobody says them
_LORA = ("networks.lora", "networks.lora_fa", "lycoris.kohya")
_OTHERS = {
    "networks.lora_fa": "trains one factor of each product and draws the other: not built",
    "networks.dylora": "DyLoRA is not built",
    "networks.oft": "is kohya's own form of OFT, whose files no other program reads; train.py trains peft's",
}
# algo of lycoris -> our type
_ALGORITHMS = {"lora": "lora", "locon": "lora", "lokr": "lokr", "ia3": "ia3"}
_BLOCKS = 23
# block of kohya's numbering that has attention -> where diffusers has it
_ATTENTION = {
    4: r"down_blocks\.1\.attentions\.0", 5: r"down_blocks\.1\.attentions\.1",
    7: r"down_blocks\.2\.attentions\.0", 8: r"down_blocks\.2\.attentions\.1",
    11: r"mid_block\.attentions\.0",
    13: r"up_blocks\.0\.attentions\.0", 14: r"up_blocks\.0\.attentions\.1", 15: r"up_blocks\.0\.attentions\.2",
    16: r"up_blocks\.1\.attentions\.0", 17: r"up_blocks\.1\.attentions\.1", 18: r"up_blocks\.1\.attentions\.2",
}  # fmt: skip
_NARROW_CONVOLUTIONS = (r".*\.resnets\.\d+\.(conv_shortcut|time_emb_proj)",)  # linear, as kohya counts them
_CONVOLUTIONS = (r".*\.resnets\.\d+\.conv[12]", r".*\.(down|up)samplers\.0\.conv")


def apply(out: Resolution) -> None:
    """Turn the flags of a network into fields; faults name the flags."""
    flags = {name: out.pop(name) for name in list(out.values) if name.startswith("?adapter.")}
    if MODULE not in flags:
        for name in (name for name, value in flags.items() if value):
            out.fault(
                name, "needs --network_module: without it all weights are trained", "--network_module=networks.lora"
            )
        return
    module, words = str(flags[MODULE]), _arguments(out, flags.get("?adapter.args") or ())
    kind = _kind(out, module, words)
    if kind is None:
        return
    out.set("adapter.type", kind, MODULE)

    # --- what is trained: kohya's scripts train text encoders too, unless told otherwise
    if flags.get("?adapter.text_only"):
        out.set("optimizer.unet_lr", 0.0, "?adapter.text_only")
    if flags.get("?adapter.unet_only") and flags.get("?adapter.text_only"):
        what = "contradicts --network_train_unet_only: nothing would be trained"
        out.fault("?adapter.text_only", what, "give one of them")
    caches_text = out.values.get("cache.text") or out.values.get("cache.text_to_disk")
    if not flags.get("?adapter.unet_only") and (flags.get("?adapter.text_only") or not caches_text):
        out.set("model.train_text_encoder", True, MODULE)
    elif caches_text and not flags.get("?adapter.unet_only"):
        out.note(MODULE, "the UNet alone gets adapters: what text encoders make is cached")

    # --- ranks, and rates of second factors
    if kind != "ia3":
        _ranks(out, flags, words)
    for name in _RATIOS if module != "lycoris.kohya" else ():
        if (text := words.pop(name, None)) is not None:
            if _is_number(text) and float(text) > 0:
                out.set(f"adapter.{name}", float(text), "?adapter.args")
            else:
                out.fault("?adapter.args", f"{name}={text} is no number above 0", f"{name}=16")
    for word in words:
        out.fault("?adapter.args", f"{word} is not known here", f"known are {', '.join(sorted(_KNOWN))}")

    # --- adapters that are added before
    scales = list(flags.get("?adapter.base_scales") or ())
    files = list(flags.get("?adapter.base") or ())
    if len(scales) > len(files):
        out.fault("?adapter.base_scales", f"has {len(scales)} numbers for {len(files)} files of --base_weights")
    elif files:
        words_of = [f"{file}:{scale}" for file, scale in zip(files, [*scales, *["1.0"] * len(files)])]
        out.set("adapter.fuse_adapters", words_of, "?adapter.base")

    # --- few bits: of what is only held nothing wide is kept, unless something is added to it
    if out.values.get(_FP8) and not files:
        out.set("model.base_dtype", "fp8", _FP8)
        if out.pop(_FP8) == "all" and not out.values.get("model.train_text_encoder"):
            out.note(MODULE, "text encoders stay as they are: --fp8_base stores what adapters are put into")


_RATIOS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
_KNOWN = ("algo", "conv_dim", "conv_alpha", "block_dims", "block_alphas", "preset", *_RATIOS)


def _arguments(out: Resolution, words: Any) -> dict[str, str]:
    """Read key=value words."""
    made: dict[str, str] = {}
    for word in words:
        key, equals, value = str(word).partition("=")
        if not equals:
            out.fault("?adapter.args", f"must be key=value, got {word!r}", "conv_dim=4 conv_alpha=1")
        else:
            made[key] = value
    return made


def _kind(out: Resolution, module: str, words: dict[str, str]) -> str | None:
    """Return the type of adapter that a module is; None with a fault where it is none that is built."""
    if module in _OTHERS or module not in _LORA:
        what = f"{module}: {_OTHERS[module]}" if module in _OTHERS else f"no such module: {module!r}"
        out.fault(MODULE, what, "networks.lora, or lycoris.kohya with --network_args algo=lora, lokr or ia3")
        return None
    if module == "networks.lora":
        return "lora"
    words.pop("preset", None)
    algorithm = words.pop("algo", "lora")
    if algorithm not in _ALGORITHMS:
        out.fault("?adapter.args", f"algo={algorithm} is not built", f"algo={', '.join(_ALGORITHMS)}")
        return None
    return _ALGORITHMS[algorithm]


def _ranks(out: Resolution, flags: Mapping[str, Any], words: dict[str, str]) -> None:
    """Set ranks and alphas: of all, of convolutions, of blocks."""
    rank, alpha = flags.get("?adapter.dim", _DIM), flags.get("?adapter.alpha", _ALPHA)
    if flags.get("?adapter.from_weights"):
        stored = _of_file(out)
        if stored is None:
            return
        rank, alpha = stored
    alpha = alpha or rank  # as kohya's networks.lora: 0 is none
    patterns: dict[str, int] = {}
    alphas: dict[str, float] = {}
    excluded: list[str] = []
    if (dims := _numbers(out, words, "block_dims")) is not None:
        own_alphas = _numbers(out, words, "block_alphas") or [alpha] * _BLOCKS
        # blocks of one rank and alpha are one expression: smaller UNets lack some of them
        groups: dict[tuple[int, float], list[str]] = {}
        for block, where in _ATTENTION.items():
            groups.setdefault((int(dims[block]), own_alphas[block] if dims[block] else 0.0), []).append(where)
        for (dim, own_alpha), places in groups.items():
            pattern = rf"({'|'.join(places)})\..*"
            if dim == 0:
                excluded.append(pattern)
            else:
                patterns[pattern], alphas[pattern] = dim, own_alpha
    elif words.pop("block_alphas", None) is not None:
        out.fault("?adapter.args", "block_alphas needs block_dims")
    if (conv := words.pop("conv_dim", None)) is not None:
        own = words.pop("conv_alpha", "1")
        if not conv.isdigit() or int(conv) < 1 or not _is_number(own):
            out.fault("?adapter.args", f"conv_dim={conv} conv_alpha={own}: a rank and a number")
            return
        text = CLIP_TARGETS if out.values.get("model.train_text_encoder") else ()
        targets = [*UNET_TARGETS, *text, *_NARROW_CONVOLUTIONS, *_CONVOLUTIONS]
        out.set("adapter.target_modules", targets, "?adapter.args")
        patterns |= dict.fromkeys(_CONVOLUTIONS, int(conv))
        alphas |= dict.fromkeys(_CONVOLUTIONS, float(own))
    elif words.pop("conv_alpha", None) is not None:
        out.fault("?adapter.args", "conv_alpha needs conv_dim")
    out.set("adapter.rank", rank, "?adapter.dim")
    out.set("adapter.alpha", float(alpha), "?adapter.alpha")
    for path, value in (("rank_pattern", patterns), ("alpha_pattern", alphas), ("exclude_modules", excluded)):
        if value:
            out.set(f"adapter.{path}", value, "?adapter.args")


def _numbers(out: Resolution, words: dict[str, str], name: str) -> list[float] | None:
    """Read a number for each of the UNet's blocks."""
    text = words.pop(name, None)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != _BLOCKS or not all(_is_number(part) for part in parts):
        out.fault("?adapter.args", f"{name} has {len(parts)} values", f"a number for each of the {_BLOCKS} blocks")
        return None
    return [float(part) for part in parts]


def network_arguments(section: AdapterSection) -> dict[str, str]:
    """Return the words of --network_args that say what a section does: files of kohya's scripts have them."""
    words: dict[str, str] = {}
    alpha = float(section.rank if section.alpha is None else section.alpha)

    # --- ranks of convolutions of 3 x 3, and of blocks, as `_ranks` names them
    if (conv := section.rank_pattern.get(_CONVOLUTIONS[0])) is not None:
        words |= {"conv_dim": str(conv), "conv_alpha": f"{section.alpha_pattern.get(_CONVOLUTIONS[0], alpha):g}"}
    dims, alphas = [section.rank] * _BLOCKS, [alpha] * _BLOCKS
    of_blocks = False
    excluded = dict.fromkeys(section.exclude_modules, 0)
    for pattern, dim in (section.rank_pattern | excluded).items():
        inside = re.fullmatch(r"\((.*)\)\\\.\.\*", pattern)
        for block, where in _ATTENTION.items():
            if inside and where in inside[1].split("|"):
                of_blocks, dims[block] = True, dim
                alphas[block] = section.alpha_pattern.get(pattern, alpha) if dim else 0.0
    if of_blocks:
        words["block_dims"] = ",".join(map(str, dims))
        words["block_alphas"] = ",".join(f"{value:g}" for value in alphas)

    # --- rates of second factors
    for name in _RATIOS:
        if (ratio := getattr(section, name)) is not None:
            words[name] = f"{ratio:g}"
    return words


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d*)?", text) is not None


def _of_file(out: Resolution) -> tuple[int, float] | None:
    """Return rank and alpha of the file that training goes on from, by its header and its alphas."""
    path = out.values.get("adapter.init_from_existing")
    name = "?adapter.from_weights"
    if not path:
        out.fault(name, "needs --network_weights, whose ranks it takes")
        return None
    file = Path(expanded(str(path)))
    try:
        ranks, alphas = _stored(file)
    except (OSError, ValueError, KeyError, struct.error, RecursionError):
        out.fault(name, f"{file} has no ranks that can be read", "a .safetensors file of a LoRA")
        return None
    if len(ranks) != 1 or len(alphas) > 1:
        what = f"{file} has layers of several ranks ({', '.join(map(str, sorted(ranks)))})"
        out.fault(name, what, "train.py with [adapter] rank_pattern and alpha_pattern")
        return None
    (rank,) = ranks
    return rank, next(iter(alphas), float(rank))


def _stored(file: Path) -> tuple[set[int], set[float]]:
    """Read ranks and alphas of a .safetensors file without its factors."""
    formats = {"F32": "<f", "F16": "<e"}
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, 1 << 27)))
        ranks = {row["shape"][0] for key, row in header.items() if re.search(r"lora_(down|A)\.", key)}
        alphas: set[float] = set()
        for key, row in header.items():
            if key.endswith(".alpha"):
                stream.seek(8 + length + row["data_offsets"][0])
                raw = stream.read(row["data_offsets"][1] - row["data_offsets"][0])
                if row["dtype"] == "BF16":
                    raw, kind = b"\0\0" + raw, "<f"
                else:
                    kind = formats[row["dtype"]]
                alphas.add(struct.unpack(kind, raw)[0])
    if any(not math.isfinite(alpha) for alpha in alphas):
        raise ValueError(file)
    return ranks, alphas
