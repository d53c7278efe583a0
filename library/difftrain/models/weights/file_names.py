"""What tensors are called in files, where transformers' modules call them otherwise.

transformers renames modules between versions and maps old files while it loads. Files keep the names that every reader
knows: those are written, and both are read. Source: transformers.conversion_mapping; tests hold each class to it.
"""

from __future__ import annotations

from collections.abc import Collection

# class -> (prefix in the module, prefix in files), the longest first
_PREFIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "CLIPTextModel": (("text_model.", "text_model."), ("", "text_model.")),
    "Qwen2_5_VLForConditionalGeneration": (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
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
    second = next((first for other, first in _TIED.get(kind.partition(":")[2], ()) if other == name), name)
    candidates = (file_name(kind, name), name, file_name(kind, second), second, *_other_names(kind, name))
    return next((each for each in candidates if each in keys), candidates[0])


def tied(kind: str) -> tuple[tuple[str, str], ...]:
    """Return the second names of a class's tensors, each with the first one."""
    return _TIED.get(kind.partition(":")[2], ())


def is_second_name(kind: str, name: str) -> bool:
    """Tell a name that a tensor has beside its first: it is neither written nor drawn."""
    return any(other == name for other, _ in tied(kind))


def _other_names(kind: str, name: str) -> tuple[str, ...]:
    """Return the second and the former names of a tensor: some files hold nothing but those."""
    known = kind.partition(":")[2]
    old = [name.replace(piece, before) for piece, before in _OLD.get(known, ()) if piece in name]
    return (*(other for other, first in _TIED.get(known, ()) if first == name), *old)
