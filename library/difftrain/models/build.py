"""Modules of any class without their weights: parameters have no memory, tables that are computed are real."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from difftrain.config.hidden_imports import defer_scipy
from difftrain.contracts import ConfigFault, Fault
from difftrain.device import patches

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hold back transformers' warnings: its picture processors miss torchvision, and no training needs them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    if level >= logging.ERROR:
        yield
        return
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def possible(part: str) -> Iterator[None]:
    """Turn what goes wrong with a part's sizes into a ConfigFault."""
    try:
        yield
    except Exception as error:  # whatever a class makes of sizes that are none; a fault stays one
        if isinstance(error, ConfigFault):
            raise
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigFault([Fault(f"the sizes of {part}", f"make no model: {reason}")]) from error


class _Hollow(TorchFunctionMode):
    """Put what is allocated to be filled later (torch.empty: parameters) on the meta device, and leave all else.

    Rotary tables, sines and fixed positions lie in no file of weights. They are buffers in some classes and plain
    attributes in others, so torch.device("meta") would lose them without a word. Drawing values for what has no memory
    is left out: torch does it in Python, for as long as building takes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        elif getattr(func, "__name__", "") in _DRAWS and (drawn := args[0] if args else options["tensor"]).is_meta:
            return drawn
        return func(*args, **options)


# of torch.nn.init and of tensors; transformers puts functions of the same names in their place while it builds
_DRAWS = frozenset(("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "constant_", "fill_", "zero_"))


def class_of(kind: str) -> Any:
    """Import "library:Class", where a library may be a module of our own."""
    library, _, name = kind.partition(":")
    is_network = library != "transformers"  # of diffusers, or ours over its modules
    defer_scipy()
    if is_network:
        patches.apply("diffusers")
    imported = vars(sys.modules[library]) if library in sys.modules else {}
    if name in imported:  # setting the level of loggers takes longer
        return imported[name]
    with quiet_imports():
        made = getattr(importlib.import_module(library), name)
    if is_network:
        patches.apply("diffusers")  # what lies in the very module of the class
    return made


def is_transformers(kind: str) -> bool:
    """Tell whether a class is of transformers, whose sizes are an object of their own."""
    return kind.startswith("transformers:")


_COPY_BYTES = 4 << 20  # of the copy of a module: more are tables, which are computed faster than they are kept
_built: dict[tuple[Any, str, torch.dtype], bytes] = {}


def build(kind: str, part: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes.

    A start looks at each part hollow, loads it and asks for its names again to export it: what was built once is copied,
    which takes a fifth of the time.
    """
    made_from = class_of(kind)
    key = (made_from, repr(sizes), torch.get_default_dtype())
    if key in _built:
        copied: nn.Module = pickle.loads(_built[key])
        return copied
    with possible(part), _Hollow(), quiet_imports():
        if is_transformers(kind):
            module = made_from(made_from.config_class(**_sizes_alone(sizes)))
        else:
            module = made_from(**sizes)
    _keep(key, module)
    return module


class _Copier(pickle.Pickler):
    """Write a module with its tables by value; those without memory are written by what they are."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and not value.is_meta:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _keep(key: tuple[Any, str, torch.dtype], module: nn.Module) -> None:
    """Keep a copy of a module as it was built, where it can be copied and has no tables to speak of."""
    if sum(buffer.nbytes for buffer in module.buffers() if not buffer.is_meta) > _COPY_BYTES:
        return
    content = io.BytesIO()
    try:
        _Copier(content, pickle.HIGHEST_PROTOCOL).dump(module)
    except Exception:  # whatever a class holds that cannot be copied: it is built anew each time
        return
    if content.tell() <= _COPY_BYTES:
        _built[key] = content.getvalue()


def _sizes_alone(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what would have a class fetch or import something, at any level."""
    return {
        key: _sizes_alone(value) if isinstance(value, Mapping) else value
        for key, value in sizes.items()
        if key.lstrip("_") not in _NO_SIZES
    }


def own_arguments(config_class: Any) -> frozenset[str]:
    """Name the sizes that a configuration class of transformers adds to those of all."""
    names: set[str] = set()
    for base in config_class.__mro__:
        if base.__name__.lower() == "pretrainedconfig":
            break
        names |= set(inspect.get_annotations(base))
    return frozenset(name for name in names if name[:1] != "_")


@cache
def defaults(kind: str) -> Mapping[str, Any]:
    """Return the arguments of a class with what it takes where nothing is said."""
    made_from = class_of(kind)
    if is_transformers(kind):
        return made_from.config_class().to_dict()
    parameters = inspect.signature(inspect.unwrap(made_from.__init__)).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def arguments(kind: str) -> frozenset[str]:
    """Name the arguments of a class."""
    return frozenset(inspect.signature(inspect.unwrap(class_of(kind).__init__)).parameters) - {"self"}


# --- Sizes of the encoders that families share, as their classes take them: no class is imported to know them


@dataclass(frozen=True)
class ClassSizes:
    """One class: its constructor's arguments with what it takes where nothing is said, and what has to be said.

    decisive: what decides, beside its weights, what it makes of the same input.
    """

    defaults: Mapping[str, Any]
    needed: tuple[str, ...]
    decisive: tuple[str, ...]


_CLIP_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_T5_NEEDED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
CLIP = ClassSizes(
    {
        "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim": 512,
        "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5, "attention_dropout": 0.0, "initializer_range": 0.02, "initializer_factor": 1.0,
        "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 1,
    },
    _CLIP_NEEDED,
    (*_CLIP_NEEDED, "max_position_embeddings", "hidden_act", "layer_norm_eps", "eos_token_id"),
)  # fmt: skip
T5 = ClassSizes(
    {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "relu", "pad_token_id": 0,
        "eos_token_id": 1,
    },
    _T5_NEEDED,
    (
        *_T5_NEEDED, "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
        "feed_forward_proj",
    ),
)  # fmt: skip
VAE = ClassSizes(
    {
        "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",), "block_out_channels": (64,), "layers_per_block": 1, "act_fn": "silu",
        "latent_channels": 4, "norm_num_groups": 32, "sample_size": 32, "scaling_factor": 0.18215,
        "shift_factor": None, "latents_mean": None, "latents_std": None, "force_upcast": True, "use_quant_conv": True,
        "use_post_quant_conv": True, "mid_block_add_attention": True,
    },
    ("block_out_channels", "latent_channels", "layers_per_block", "scaling_factor"),
    (
        "in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels",
        "norm_num_groups", "use_quant_conv", "mid_block_add_attention",
    ),
)  # fmt: skip
BY_CLASS = {
    "diffusers:AutoencoderKL": VAE,
    "transformers:CLIPTextModel": CLIP,
    "transformers:CLIPTextModelWithProjection": CLIP,
    "transformers:T5EncoderModel": T5,
}
_ABOUT_THE_FILE = frozenset(("architectures", "torch_dtype", "dtype", "transformers_version", "model_type"))
# of a config.json what asks for kernels of a hub, for code, or for other ways to keep numbers
_NO_SIZES = frozenset((
    "attn_implementation", "attn_implementation_internal", "experts_implementation", "auto_map", "quantization_config",
    "use_kernels", "kernel_config", "name_or_path",
))  # fmt: skip
# of what is needed, what is no positive whole number
NO_COUNTS = ("scaling_factor", "block_out_channels", "down_block_types", "up_block_types", "addition_embed_type")
_IMMATERIAL = frozenset((
    "sample_size", "force_upcast", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "out_channels",
    "up_block_types", "use_post_quant_conv", "initializer_range", "initializer_factor", "attention_dropout",
    "dropout_rate", "bos_token_id", "pad_token_id", "eos_token_id",
))  # fmt: skip


def complete(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a class's arguments: those given, and what it takes where nothing is said."""
    if kind in BY_CLASS:
        return {**BY_CLASS[kind].defaults, **sizes}

    return {**defaults(kind), **sizes}


def accepted(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a config.json its class takes; of language models all that is no note about the file."""
    if kind.startswith("transformers:CLIPText") and isinstance(content.get("text_config"), Mapping):
        content = {**content["text_config"], **{key: content[key] for key in ("projection_dim",) if key in content}}
    if (
        kind in BY_CLASS and not any(key for key in content if key not in BY_CLASS[kind].defaults and key[:1] != "_")
    ) or (kind in BY_CLASS and kind.startswith("transformers:")):
        known = frozenset(BY_CLASS[kind].defaults)
    elif kind.startswith("transformers:"):
        return {key: value for key, value in content.items() if key[:1] != "_" and key not in _ABOUT_THE_FILE}
    else:
        known = arguments(kind)
    return {key: value for key, value in content.items() if key in known}


def decisive(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides, weights aside, what an encoder makes: written down, or its class's default."""
    known = BY_CLASS.get(kind)
    made = {key: sizes.get(key, known.defaults[key]) for key in known.decisive} if known else {}
    made |= {key: value for key, value in sizes.items() if key not in _IMMATERIAL}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}


def needed(kind: str) -> tuple[str, ...]:
    """Name the sizes of a shared encoder that have to be said."""
    return BY_CLASS[kind].needed if kind in BY_CLASS else ()
