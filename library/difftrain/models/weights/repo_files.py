"""Which files of a repository a model needs: pure functions of its listing, the same rule as reading a folder.

Each returns the files to fetch, and the file or folder in the repository ("" is its top) to hand on as a path. Weights
are fetched as safetensors: full precision where it is there, else fp16; pickles only where a file is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

INDEX = "model_index.json"  # of diffusers: which folders make up the model
OURS, FULL = "difftrain.json", "transformer_full"  # of an SD3 that difftrain exported
_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".onnx_data", ".xml")
_VOCABULARY = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

Files = tuple[list[str], str]
Read = Callable[[str], bytes]  # the content of a small file of the repository


class Unfit(Exception):
    """Say that a repository does not hold what was asked for, and what it holds."""


def weights(files: Sequence[str], path: str, read: Read) -> Files:
    """Choose the files of a whole model: a file that is named, a diffusers folder, or the one .safetensors file."""
    if path in files:
        return [path], path
    inside = _inside(files, path)
    if INDEX not in inside:
        return _single(inside, path)
    chosen = [_join(path, INDEX)]
    for folder in _components(read(_join(path, INDEX))):
        chosen += [_join(path, folder, name) for name in _component(_inside(files, _join(path, folder)), folder)]
    if OURS in inside:  # written by difftrain: what diffusers' index does not name
        file = _inside(files, _join(path, FULL))
        chosen += [_join(path, OURS), *(_join(path, FULL, name) for name in _component(file, FULL))]
    return chosen, path


def vae(files: Sequence[str], path: str, read: Read) -> Files:
    """Choose the files of a VAE: a file that is named, a folder of its own, or that of a whole diffusers model."""
    if path in files:
        return [path], path
    inside = _inside(files, path)
    folder = "vae" if INDEX in inside else ""
    own = _inside(files, _join(path, folder))
    if "config.json" not in own:
        return _single(inside, path)
    return [_join(path, folder, name) for name in _component(own, folder or path or "it")], path


def tokenizer(files: Sequence[str], path: str, read: Read) -> Files:
    """Choose the files of a CLIP tokenizer: a file that is named, or a folder's."""
    if path in files:
        return [path], path
    chosen = [name for name in _VOCABULARY if name in _inside(files, path)]
    if not {"vocab.json", "merges.txt"} <= set(chosen) and "tokenizer.json" not in chosen:
        tokenizers = sorted(
            {file.rpartition("/")[0] for file in files if file.endswith(("/vocab.json", "/tokenizer.json"))}
        )
        nearby = f"; tokenizers there: {', '.join(tokenizers)}" if tokenizers else ""
        raise Unfit(f"has neither vocab.json and merges.txt nor tokenizer.json{nearby}")
    return [_join(path, name) for name in chosen], path


def t5_tokenizer(files: Sequence[str], path: str, read: Read) -> Files:
    """Choose the files of a T5 tokenizer: a file that is named, or a folder's."""
    if path in files:
        return [path], path
    chosen = [name for name in ("tokenizer.json", "spiece.model") if name in _inside(files, path)]
    if not chosen:
        raise Unfit("has neither tokenizer.json nor spiece.model")
    return [_join(path, name) for name in chosen], path


def _single(inside: Sequence[str], path: str) -> Files:
    """Take the one file of weights of a folder. Raises Unfit where there is none, or more than one."""
    files = [name for name in inside if name.endswith(".safetensors") and "/" not in name]
    if len(files) == 1:
        return [_join(path, files[0])], _join(path, files[0])
    if files:
        raise Unfit(f"holds {len(files)} files of weights; name one of {_some(files)}")
    pickles = [name for name in inside if name.endswith((".ckpt", ".pt"))]
    if pickles:
        raise Unfit(f"contains only pickles, which are only fetched when named: {_some(pickles)}")
    raise Unfit(f"is not a model: neither {INDEX} nor a .safetensors file; it holds {_some(inside) or 'nothing'}")


def _components(index: bytes) -> list[str]:
    """Read the folders out of model_index.json: entries of [package, class], both given."""
    try:
        content = json.loads(index)
    except (ValueError, RecursionError):
        raise Unfit(f"has a {INDEX} that is not JSON") from None
    entries = content.items() if isinstance(content, dict) else ()
    return [name for name, value in entries if isinstance(value, list) and len(value) == 2 and all(value)]


def _component(inside: Sequence[str], folder: str) -> list[str]:
    """Choose the files of one part: its small files, and its weights in one form."""
    names = [name for name in inside if "/" not in name]
    small = [name for name in names if name.endswith((".json", ".txt", ".model")) and ".index." not in name]
    if not any(name.endswith(_WEIGHTS) for name in names):
        return small
    for variant in ("", ".fp16"):
        for stem in _STEMS:
            file = f"{stem}{variant}.safetensors"
            if file in names:
                return [*small, file]
            if f"{file}.index.json" in names:
                shard = re.compile(rf"{re.escape(stem + variant)}-\d+-of-\d+\.safetensors")
                return [*small, f"{file}.index.json", *filter(shard.fullmatch, names)]
    files = [name for name in names if name.endswith(_WEIGHTS)]
    raise Unfit(f"has no .safetensors weights in {folder}, only {_some(files)}; pickles are not fetched")


def _inside(files: Sequence[str], path: str) -> list[str]:
    """Return the files of a folder, relative to it."""
    prefix = f"{path}/" if path else ""
    return [file[len(prefix) :] for file in files if file.startswith(prefix)]


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
