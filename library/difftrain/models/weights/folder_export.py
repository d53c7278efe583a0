"""Folders of weights that are whole or absent, and parts of them that need no second copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.io.files import aside_of

if TYPE_CHECKING:
    from torch import nn

    from difftrain.models.row import FamilyRow

CARD = "README.md"  # beside an export: how to draw with it
WRITTEN_BY = "Written by difftrain"  # in each such page: another page of that name is the user's own
_REFERENCE = '\nfrom diffusers.utils import load_image\n\nreference = load_image("reference.png")\n'


def snippet_head(row: FamilyRow, dtype: str, *, reference: bool = False) -> str:
    """Return the lines that load a folder: without its dtype, diffusers and transformers choose two that do not go together.

    reference: an image is read, too, for the call behind them.
    """
    return (
        f"import torch\nfrom {row.pipeline_module} import {row.pipeline}\n\n"
        f'pipe = {row.pipeline}.from_pretrained(".", torch_dtype={dtype})\n'
        'pipe.to(torch.accelerator.current_accelerator() or "cpu")\n'
    ) + (_REFERENCE if reference else "")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Hand out a folder aside; put it in place on leaving, where an older one goes only when the new one is whole."""
    aside = aside_of(path)
    aside.mkdir(parents=True)
    try:
        yield aside
        _swap_in(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def inside(folder: Path, last: str) -> Iterator[Path]:
    """Hand out the path of a folder to be made aside; on leaving put what is in it into `folder`, beside what else is there.

    last: the file that says that all is there: an older one goes first, the new one comes when the rest is in place. A page
    that somebody has written there himself stays.
    """
    aside = aside_of(folder / "pipeline")
    aside.mkdir(parents=True)
    try:
        parts = aside / "parts"
        yield parts
        (folder / last).unlink(missing_ok=True)
        page = folder / CARD
        if page.exists() and WRITTEN_BY not in page.read_text(encoding="utf-8", errors="replace"):
            (parts / CARD).unlink(missing_ok=True)
        for part in sorted(parts.iterdir(), key=lambda path: path.name == last):
            _swap_in(part, folder / part.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _swap_in(aside: Path, path: Path) -> None:
    if not path.exists():
        aside.rename(path)
        return
    old = aside.with_suffix(".old")
    path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def plain_files(paths: Sequence[Path], stem: str) -> list[tuple[Path, str]] | None:
    """Say under which names a part's files of weights lie where every reader finds them; None: they must be rewritten.

    One file of safetensors goes by its plain name, whatever variant it was; shards keep theirs, beside their index.
    """
    if len(paths) == 1 and paths[0].suffix == ".safetensors":
        return [(paths[0], f"{stem}.safetensors")]
    index = paths[0].with_name(f"{stem}.safetensors.index.json")
    if not index.is_file() or {path.name for path in paths} != set(_shards(index)):
        return None
    return [*((path, path.name) for path in paths), (index, index.name)]


def _shards(index: Path) -> Iterator[str]:
    yield from json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()


# --- What tensors are called in files, where transformers' modules call them otherwise
# transformers renames modules between versions and maps old files while it loads. Files keep the names that every reader
# knows: those are written, and both are read. Source: transformers.conversion_mapping; tests hold each class to it.


# class -> (prefix in the module, prefix in files), the longest first
_PREFIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "CLIPTextModel": (("text_model.", "text_model."), ("", "text_model.")),
    "CLIPVisionModel": (("vision_model.", "vision_model."), ("", "vision_model.")),
    "SiglipVisionModel": (("vision_model.", "vision_model."), ("", "vision_model.")),
    "Qwen3Model": (("", "model."),),
    "Qwen2_5_VLForConditionalGeneration": (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
    ),
    "Mistral3ForConditionalGeneration": (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
}
# class -> (name in the module that is a second name of another, that other): one table of words
_TIED: dict[str, tuple[tuple[str, str], ...]] = {
    "T5EncoderModel": (("encoder.embed_tokens.weight", "shared.weight"),),
    "UMT5EncoderModel": (("encoder.embed_tokens.weight", "shared.weight"),),
}
# class -> (piece of a name, what it was before diffusers 0.17)
_OLD: dict[str, tuple[tuple[str, str], ...]] = {
    "AutoencoderKL": ((".to_q.", ".query."), (".to_k.", ".key."), (".to_v.", ".value."), (".to_out.0.", ".proj_attn.")),
}


def file_name(kind: str, name: str) -> str:
    """Return what a module's tensor is called in files. kind: "library:Class"."""
    for ours, theirs in _PREFIXES.get(kind.partition(":")[2], ()):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def stored_name(kind: str, name: str, keys: Collection[str]) -> str:
    """Return under which of its names a tensor lies in files that hold these keys."""
    second = next((first for second_name, first in _TIED.get(kind.partition(":")[2], ()) if second_name == name), name)
    candidates = (file_name(kind, name), name, file_name(kind, second), second, *_other_names(kind, name))
    return next((candidate for candidate in candidates if candidate in keys), candidates[0])


def tied(kind: str) -> tuple[tuple[str, str], ...]:
    """Return the second names of a class's tensors, each with the first one."""
    return _TIED.get(kind.partition(":")[2], ())


def is_second_name(kind: str, name: str) -> bool:
    """Tell a name that a tensor has beside its first: it is neither written nor drawn."""
    return any(second_name == name for second_name, _ in tied(kind))


def second_names(kind: str, module: nn.Module) -> set[str]:
    """Return the second names of a module's tensors: those of its class, and what its sizes tie.

    transformers says it: a module that was moved to the meta device is tied no longer.
    """
    return {second_name for second_name, _ in tied(kind)} | set(getattr(module, "all_tied_weights_keys", None) or {})


def _other_names(kind: str, name: str) -> tuple[str, ...]:
    """Return the second and the former names of a tensor: some files hold nothing but those."""
    known = kind.partition(":")[2]
    old = [name.replace(piece, before) for piece, before in _OLD.get(known, ()) if piece in name]
    return (*(second_name for second_name, first in _TIED.get(known, ()) if first == name), *old)
