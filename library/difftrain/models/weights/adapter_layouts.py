"""What layers of an adapter (LoRA, DoRA) are called in each layout, and how the factors of layers that a layout fuses go together.

1. Layers have the names of diffusers' modules, apart by the folder of their part; of CLIP with `text_model.` before them.
2. An index maps the names of every layout to them: diffusers', PEFT's, ComfyUI's, kohya's.
3. Where the original layout holds several layers as one (qkv), their factors become one of block structure, which is
   exact: A_1, A_2 one below another, B_1, B_2 on a diagonal; lengths of rows (DoRA) one behind another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.build import build
from difftrain.models.weights.folder_export import file_name
from difftrain.models.weights.keys import swapped, table_rule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily

LayerKey = tuple[str, str]  # folder, layer
PEFT_PREFIX = "base_model.model."  # before the names of a file that PEFT wrote by itself
PIECES = "difftrain.pieces"  # of a header: rank and alpha of the layers that a fused one is made of
_FACTOR = re.compile(
    r"(?P<stem>.+)\.(?:(?:lora_(?P<side>A|B|down|up)(?:\.(?!weight$)[^.]+)?|lora(?:_linear_layer)?\.(?P<old>down|up))\.weight"
    r"|(?P<lengths>dora_scale|lora_magnitude_vector(?:\.weight)?))"
)
_SIDES = {"A": "a", "down": "a", "B": "b", "up": "b"}


@dataclass
class LoraPair:
    """The two factors of one layer, and what the product is multiplied with beside the scale.

    Shapes: a (R, in, ...), b (out, R, ...). alpha: None is the rank. keys: what the tensors are called in their file.
    lengths: of DoRA, (out,), those of the rows of the weight with the product.
    """

    keys: list[str] = field(default_factory=list)
    a: Tensor | None = None
    b: Tensor | None = None
    alpha: float | None = None
    root: bool = False  # rsLoRA
    lengths: Tensor | None = None

    def put(self, layer: str, side: str, key: str, value: Tensor) -> None:
        """Take in a tensor of a file: the factor "a" or "b", or "lengths". layer: its name there. Raises NamedTwice."""
        self.keys.append(key)
        if getattr(self, side) is not None:
            raise NamedTwice(layer, self.keys)
        setattr(self, side, value.flatten() if side == "lengths" else value)

    @property
    def rank(self) -> int:
        """Return the rank; 0 where the first factor is missing."""
        return 0 if self.a is None else self.a.shape[0]

    @property
    def plain_alpha(self) -> float:
        """Return the alpha that says the same where the product is divided by the rank, and not by its root."""
        if self.alpha is None:
            return self.rank
        return self.alpha * sqrt(self.rank) if self.root else self.alpha

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether the product has the shape of a layer's weight."""
        if self.a is None or self.b is None or min(self.a.ndim, self.b.ndim) < 2:
            return False
        out, into = self.b.shape[0], prod(self.a.shape[1:])
        if self.lengths is not None and self.lengths.numel() != out:
            return False
        return prod(self.b.shape[1:]) == self.rank and (out, into) == (shape[0], prod(shape[1:]))

    def delta(self, shape: Sequence[int]) -> Tensor | None:
        """Return alpha / rank B A in the layer's shape, fp32; None where it does not fit."""
        if self.a is None or self.b is None or not self.fits(shape):
            return None
        factor = self.plain_alpha / self.rank
        return (factor * (self.b.float().flatten(1) @ self.a.float().flatten(1))).reshape(*shape)

    def changed(self, weight: Tensor, scale: float) -> Tensor | None:
        """Return a weight with the product at a scale, its rows of the lengths that are said, fp32; None where it does not fit.

        Source: Liu et al. 2024, DoRA, equation 5.
        """
        delta = self.delta(weight.shape)
        if delta is None:
            return None
        made = weight.float() + scale * delta.to(weight.device)
        if self.lengths is None:
            return made
        lengths = self.lengths.float().flatten().to(weight.device) / made.flatten(1).norm(dim=1)
        return made * lengths.view(-1, *(1,) * (made.ndim - 1))


class LayerPiece(NamedTuple):
    """A layer in a file's: its rows there. halves: the two halves of its rows are swapped."""

    key: LayerKey
    rows: int
    halves: bool = False


class NamedTwice(ValueError):
    """An adapter has two pairs for one layer, or a factor two times. keys: of the tensors, in their file."""

    def __init__(self, layer: str, keys: Iterable[str]) -> None:
        super().__init__(layer)
        self.layer, self.keys = layer, list(keys)


class AdapterLayouts:
    """The names of one model's layers in every layout.

    sizes: of parts by their folders, in place of the family's own: a release's, where there are no weights.
    """

    def __init__(self, family: BaseFamily, sizes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.family, self.lora, self._sizes = family, family.lora, sizes or {}
        self.denoiser = family.folder(family.denoiser)
        self._parts = {family.folder(part): part for part in family.parts}
        self._parts |= {part: part for part in family.parts if part not in self._parts}
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._modules: dict[str, nn.Module] = {}

    def folder(self, part: str) -> str:
        """Return the folder of a part, by either name."""
        return self.family.folder(self._parts[part]) if part in self._parts else part

    def has(self, folder: str) -> bool:
        """Tell whether the model has a part of that folder."""
        return folder in self._parts

    def part(self, folder: str) -> str:
        """Return the part of a folder."""
        return self._parts[folder]

    def module(self, folder: str) -> nn.Module:
        """Return a part without weights."""
        if folder not in self._modules:
            part = self._parts[folder]
            if folder in self._sizes:
                self._modules[folder] = build(self.family.parts[part], part, self._sizes[folder])
            else:
                self._modules[folder] = self.family.exported(part)
        return self._modules[folder]

    def layer(self, folder: str, name: str) -> str:
        """Return a layer's name as files have it: modules of CLIP lost their first word in transformers 5.6."""
        kind = self.family.parts[self._parts[folder]]
        return file_name(kind, name) if kind.partition(":")[2].startswith("CLIPText") else name

    def shapes(self, folder: str) -> Mapping[str, tuple[int, ...]]:
        """Return the layers of a part that an adapter may go to, with their weights' shapes."""
        if folder not in self._shapes:
            weights = {name: getattr(module, "weight", None) for name, module in self.module(folder).named_modules()}
            self._shapes[folder] = {
                self.layer(folder, name): tuple(weight.shape)
                for name, weight in weights.items()
                if isinstance(weight, torch.Tensor) and weight.ndim > 1
            }
        return self._shapes[folder]

    # ------------------------------------------------------------------ names

    @cached_property
    def original(self) -> dict[str, list[LayerPiece]]:
        """Map layers of the denoiser's original layout to ours, one behind another."""
        net, made = self.module(self.denoiser), {}
        stored = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        by_net = self.family.rule(self.family.denoiser)
        rule = table_rule(self.lora.layers, stored) if self.lora.layers else by_net(net) if by_net else None
        starts: dict[str, list[tuple[int, LayerPiece]]] = {}
        for name, shape in self.shapes(self.denoiser).items():
            try:
                piece = rule(f"{name}.weight") if rule else None
            except KeyError:  # the table is of layers in blocks alone
                continue
            key = piece.key.removesuffix(".weight") if piece else name
            own = LayerPiece((self.denoiser, name), shape[0], piece.halves if piece else False)
            starts.setdefault(key, []).append((piece.start if piece else 0, own))
        for key, pieces in starts.items():
            made[key] = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        return made

    def text_folders(self) -> list[str]:
        """Return the folders of the text encoders, in order."""
        return [self.family.folder(text.part) for text in self.family.texts]

    def kohya_prefix(self, folder: str) -> str:
        """Return what kohya's scripts put before the names of a part's layers."""
        if folder == self.denoiser:
            return "lora_unet_"
        texts = self.text_folders()
        return "lora_te_" if len(texts) == 1 else f"lora_te{texts.index(folder) + 1}_"

    @cached_property
    def _unfused(self) -> dict[str, str]:
        """Map layers of the denoiser to their names in the original layout, where they are a layer of their own there."""
        return {pieces[0].key[1]: name for name, pieces in self.original.items()
                if len(pieces) == 1 and not pieces[0].halves and pieces[0].rows == self.shapes(self.denoiser)[pieces[0].key[1]][0]}  # fmt: skip

    def own_name(self, folder: str, layer: str) -> str | None:
        """Return what kohya's scripts, of UNets, or ComfyUI call one of our layers; None where they fuse it with others."""
        original = self.lora.kohya == "original" if self.lora.kohya else self.lora.original
        name: str | None = layer
        if folder == self.denoiser and original:
            name = self._unfused.get(layer)
        if name is None:
            return None
        if self.lora.kohya:
            return self.kohya_prefix(folder) + name.replace(".", "_")
        return f"{self.lora.comfy}{name}" if folder == self.denoiser else f"{folder}.{name}"

    def index(self, stems: Iterable[str]) -> dict[str, list[LayerPiece]]:
        """Map the names of layers in every layout to ours. stems: those that are looked for."""
        first = {stem.partition(".")[0] for stem in stems}
        made: dict[str, list[LayerPiece]] = {}

        # --- the denoiser: by its own names, then by those of its original layout
        own = {
            name: [LayerPiece((self.denoiser, name), shape[0])] for name, shape in self.shapes(self.denoiser).items()
        }
        for name, pieces in own.items():
            flat = name.replace(".", "_")
            made[f"{self.denoiser}.{name}"] = made[f"{PEFT_PREFIX}{name}"] = pieces
            made[f"lora_unet_{flat}"] = made[f"lora_transformer_{flat}"] = pieces
        for prefix in dict.fromkeys((self.lora.comfy, "diffusion_model.", "model.diffusion_model.")):
            for name, pieces in (self.original | own if not self.lora.original else own | self.original).items():
                made.setdefault(f"{prefix}{name}", pieces)
        for name, pieces in self.original.items():
            made.setdefault("lora_unet_" + name.replace(".", "_"), pieces)

        # --- text encoders that the file names
        for number, folder in enumerate(self.text_folders(), start=1):
            flat_prefixes = [f"lora_te{number}_", *(["lora_te_"] if number == 1 else [])]
            if folder not in first and not any(stem.startswith(tuple(flat_prefixes)) for stem in first):
                continue
            for name, shape in self.shapes(folder).items():
                pieces = [LayerPiece((folder, name), shape[0])]
                made[f"{folder}.{name}"] = made[f"{folder}.{name.removeprefix('text_model.')}"] = pieces
                made |= {prefix + name.replace(".", "_"): pieces for prefix in flat_prefixes}
        return made

    # ------------------------------------------------------------------ reading

    def sorted(self, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[LayerKey, LoraPair] | None:
        """Sort tensors by the layers that they are for; None where a name is in no layout that is known here.

        Raises NamedTwice: which of two is meant, or both one after the other, no layout says.
        """
        stems: dict[str, LoraPair] = {}
        for name, value in tensors.items():
            if name.endswith(".alpha"):
                stems.setdefault(name.removesuffix(".alpha"), LoraPair()).alpha = float(value)
                continue
            if not (match := _FACTOR.fullmatch(name)):
                return None
            pair = stems.setdefault(match["stem"], LoraPair())
            side = "lengths" if match["lengths"] else _SIDES[match["side"] or match["old"]]
            pair.put(match["stem"], side, name, value)
        known = self.index(stems)
        if any(stem not in known for stem in stems):
            return None

        made: dict[LayerKey, LoraPair] = {}
        ranks = _pieces_of(header)
        for stem, pair in stems.items():
            if not pair.keys:  # an alpha of nothing
                continue
            pieces = known[stem]
            parted = [pair] if len(pieces) == 1 else split(pair, pieces, ranks.get(stem))
            for piece, one in zip(pieces, parted, strict=True):
                if one is not None:
                    if piece.halves and one.b is not None:
                        one.b = swapped(one.b, True)
                        one.lengths = None if one.lengths is None else swapped(one.lengths, True)
                    if piece.key in made:
                        raise NamedTwice(piece.key[1], made[piece.key].keys + pair.keys)
                    made[piece.key] = one
        return made

    # ------------------------------------------------------------------ writing

    def fused(self, pairs: Mapping[LayerKey, LoraPair]) -> tuple[dict[str, LoraPair], dict[str, Any]]:
        """Return the denoiser's pairs by the names of its original layout, and the pieces of those that were fused.

        A layer that has no name there keeps its own. Raises ConfigFault where a layer there is DoRA in part.
        """
        named = {piece.key for pieces in self.original.values() for piece in pieces}
        made = {layer: pair for (folder, layer), pair in pairs.items()
                if folder == self.denoiser and (folder, layer) not in named}  # fmt: skip
        ranks: dict[str, Any] = {}
        for name, pieces in self.original.items():
            own = [pairs.get(piece.key) for piece in pieces]
            if not any(own):
                continue
            turned = [
                None
                if pair is None
                else replace(_turned(pair, piece.halves), keys=[], alpha=pair.plain_alpha, root=False)
                for pair, piece in zip(own, pieces, strict=True)
            ]
            if len(turned) == 1 and turned[0] is not None:
                made[name] = turned[0]
                continue
            lacking = [piece.key[1] for pair, piece in zip(own, pieces) if pair is None or pair.lengths is None]
            if lacking and any(pair is not None and pair.lengths is not None for pair in own):
                what = f"is one layer there, and {', '.join(lacking)} has no lengths of rows (DoRA)"
                raise ConfigFault([Fault(name, what, "adapters of all its layers, or LoRA")])
            made[name], ranks[name] = join(turned, pieces)
        return made, ranks


def stems_of(names: Iterable[str]) -> set[str]:
    """Return the names of layers in those of an adapter's factors."""
    return {match["stem"] for name in names if (match := _FACTOR.fullmatch(name))}


def _turned(pair: LoraPair, halves: bool) -> LoraPair:
    """Swap the two halves of a layer's rows, where they are swapped in a file."""
    assert pair.b is not None
    lengths = None if pair.lengths is None else swapped(pair.lengths, halves)
    return replace(pair, b=swapped(pair.b, halves), lengths=lengths)


def _pieces_of(header: Mapping[str, str]) -> dict[str, Any]:
    """Read ranks and alphas of pieces from a header of ours; nothing where there is none, or it is none of ours."""
    try:
        made = json.loads(header.get(PIECES, "{}"))
    except (ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}


def join(pairs: Sequence[LoraPair | None], pieces: Sequence[LayerPiece]) -> tuple[LoraPair, list[list[float] | None]]:
    """Make one pair of those of the pieces of a layer; a piece without one keeps its weights. Return rank and alpha of each.

    Factors alpha / rank that differ go into B, as the whole has one.
    """
    own = [pair for pair in pairs if pair is not None and pair.a is not None and pair.b is not None]
    first, rank = next((pair for pair in own if pair.plain_alpha), own[0]), sum(pair.rank for pair in own)
    assert first.b is not None
    factor = first.plain_alpha / first.rank or 1.0
    b = first.b.new_zeros(sum(piece.rows for piece in pieces), rank)
    ranks: list[list[float] | None] = []
    row = column = 0
    for pair, piece in zip(pairs, pieces, strict=True):
        ranks.append(None)
        if pair is not None and pair.b is not None:
            more = pair.plain_alpha / pair.rank / factor
            block = pair.b if more == 1 else (more * pair.b.float()).to(b)
            b[row : row + piece.rows, column : column + pair.rank] = block
            column += pair.rank
            ranks[-1] = [pair.rank, pair.plain_alpha if more == 1 else factor * pair.rank]
        row += piece.rows
    a = torch.cat([pair.a for pair in own if pair.a is not None])
    lengths = [pair.lengths for pair in own if pair.lengths is not None]
    return LoraPair(
        [], a, b, first.plain_alpha * rank / first.rank, lengths=torch.cat(lengths) if lengths else None
    ), ranks


def split(pair: LoraPair, pieces: Sequence[LayerPiece], ranks: Any = None) -> list[LoraPair | None]:
    """Part a pair by the pieces of its layer.

    ranks: (rank, alpha) of each piece, None of one without a pair, where a header of ours says them. Else blocks are parted
    where B is zero off a diagonal of equal ones; and in general A is every piece's, and B is cut.
    """
    a, b, count = pair.a, pair.b, len(pieces)
    if a is None or b is None or b.ndim != 2 or b.shape != (sum(piece.rows for piece in pieces), a.shape[0]):
        return [LoraPair(pair.keys, a, None, pair.alpha) for _ in pieces]  # fits nowhere, and is named then
    rows = b.split([piece.rows for piece in pieces])
    rank = a.shape[0]
    if pair.lengths is not None and pair.lengths.numel() == b.shape[0]:
        parted = split(replace(pair, lengths=None), pieces, ranks)
        lengths = pair.lengths.split([piece.rows for piece in pieces])
        return [None if one is None else replace(one, lengths=own) for one, own in zip(parted, lengths, strict=True)]
    if _fits(ranks, count, rank):
        widths = [0 if one is None else one[0] for one in ranks]
        blocks = zip(a.split(widths), (part.split(widths, dim=1)[i] for i, part in enumerate(rows)), ranks, strict=True)
        return [
            None if one is None else LoraPair(pair.keys, top.clone(), part.contiguous(), float(one[1]))
            for top, part, one in blocks
        ]
    width = rank // count
    on_diagonal = [part[:, i * width : (i + 1) * width] for i, part in enumerate(rows)]
    if rank % count == 0 and b.any() and sum(map(torch.count_nonzero, on_diagonal)) == torch.count_nonzero(b):
        alpha = None if pair.alpha is None else pair.alpha / count
        return [
            LoraPair(pair.keys, top.clone(), part.contiguous(), alpha)
            for top, part in zip(a.split(width), on_diagonal, strict=True)
        ]
    return [LoraPair(pair.keys, a, part.contiguous(), pair.alpha) for part in rows]


def _fits(ranks: Any, count: int, rank: int) -> bool:
    """Tell whether what a header says of pieces can be: they add up to the rank."""
    try:
        return len(ranks) == count and sum(0 if one is None else int(one[0]) for one in ranks) == rank
    except (TypeError, ValueError, LookupError):
        return False
