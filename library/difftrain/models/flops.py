"""Floating-point operations of one sample: the very pass, forward and backward, counted by torch without memory.

A step's work is a polynomial in the number of image tokens, of degree 2: products over tokens, and attention. Blocks of
one list are alike, the first and the last apart. So few blocks are counted at three sizes, and the rest is arithmetic,
exact to the last digit. Recomputed activations are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from difftrain.contracts import Batch, Bucket, Inputs, control_name
from difftrain.models import repa, shown_frames
from difftrain.models.root import DenoiserRoot
from difftrain.models.routing import KEEP
from difftrain.models.text.clip_tokens import chunks_of
from difftrain.models.text.clip_vocabulary import LENGTH
from difftrain.models.text.tokenize import mask_name

if TYPE_CHECKING:
    from difftrain.models.base import BaseFamily
    from difftrain.models.facts import Text


_FEW = 4  # blocks of a list that are counted one by one
_KEPT = (2, 4, 6)  # how many tokens of small pictures stay
Points = list[tuple[int, int]]  # tokens and what they cost
_known: dict[str, tuple[Points, Points]] = {}


def flops_per_sample(family: BaseFamily, bucket: Bucket) -> float:
    """Count what a step costs for one sample of a bucket; frozen weights need no gradient of their own.

    All tokens and those that stay add up, f(N, K) = g(N) + h(K), each of degree 2: five counts say all of them.
    """
    sizes = {part: family.source.sizes[part] for part in family.parts}
    speed = [family.cfg.repa.model_dump(), family.cfg.tread.model_dump(), family.cfg.patch_masking.model_dump()]
    seen = [sight(bucket) for sight in family.sights if sight is not None]
    shown = family.control_area.bucket(bucket) if family.control_area is not None else ()
    inputs = [
        family.name,
        sizes,
        bucket.frames,
        family.lengths,
        family.cfg.model.train_only,
        family.cfg.adapter.model_dump_json(),
        speed,
        family.num_control,
        *shown,
    ]
    key = json.dumps([*inputs, *seen, family.cfg.loss.text_recon_gamma > 0], default=str, sort_keys=True)
    if key not in _known:
        _known[key] = _counts(family, bucket)
    by_tokens, by_kept = _known[key]
    tokens = family.image_tokens(bucket.height // family.token, bucket.width // family.token)
    total = _through(by_tokens, tokens)
    if by_kept:
        (kept,) = family.features.draws[KEEP].shape(bucket)
        total += _through(by_kept, kept) - by_kept[0][1]
    return float(total)


def _counts(family: BaseFamily, bucket: Bucket) -> tuple[Points, Points]:
    """Count small pictures beside the texts of a bucket: of several sizes, and of the largest with more and more tokens that stay."""
    root, token = on_meta(family), family.token
    fewest = 0 if root.span is None else _KEPT[0]
    small = [Bucket(rows * token, columns * token, bucket.frames) for rows, columns in family.small_sizes]
    costs = [_by_blocks(family, root, one, fewest, bucket) for one in small]
    by_tokens = [(family.image_tokens(*size), cost) for size, cost in zip(family.small_sizes, costs)]
    if root.span is None:
        return by_tokens, []
    largest = small[-1]
    more = [(kept, _by_blocks(family, root, largest, kept, bucket)) for kept in _KEPT[1:]]
    return by_tokens, [(fewest, by_tokens[-1][1]), *more]


def _through(points: Points, x: int) -> int:
    """Return the value at x of the polynomial through points (Lagrange), exact."""
    total = Fraction(0)
    for i, (xi, yi) in enumerate(points):
        term = Fraction(yi)
        for j, (xj, _) in enumerate(points):
            term *= Fraction(x - xj, xi - xj) if i != j else 1
        total += term
    return int(total)


def _by_blocks(family: BaseFamily, root: Any, bucket: Bucket, kept: int, texts_of: Bucket) -> int:
    """Count with few blocks of each list whose middle ones are alike, and once more with one block more of each."""
    inputs = blank_inputs(family, bucket, texts_of=texts_of)
    if kept:
        inputs.conditions[KEEP] = inputs.conditions[KEEP].new_zeros((1, kept))
    net = root.denoiser
    lists = {name: list(net.get_submodule(name)) for name in family.blocks}
    # blocks of one list cost the same, so three stand for many; not where a pass looks at some of them
    whole_passes = root.span is not None or root.target_layer is not None or hasattr(root, "projector")
    whole_passes = whole_passes or any(len({_design(block) for block in blocks[1:-1]}) > 1 for blocks in lists.values())

    def count(more: str = "") -> int:
        for name, blocks in lists.items():
            few = blocks if whole_passes or len(blocks) < _FEW else [*blocks[: 2 + (name == more)], blocks[-1]]
            owner, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(owner), leaf, torch.nn.ModuleList(few))
        with FlopCounterMode(display=False) as counter:
            align = hasattr(root, "projector")
            outputs = root(inputs.x_t, inputs.timestep, inputs.conditions, align=align)
            torch.stack([output.sum() for output in outputs if output.requires_grad]).sum().backward()
        return int(counter.get_total_flops())

    total = base = count()
    if not whole_passes:
        # the cost of one block more of each list, times how many were left out
        total += sum((len(blocks) - 3) * (count(name) - base) for name, blocks in lists.items() if len(blocks) >= _FEW)
    for name, blocks in lists.items():
        owner, _, leaf = name.rpartition(".")
        setattr(net.get_submodule(owner), leaf, torch.nn.ModuleList(blocks))
    return total


def _design(block: torch.nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    """Return what tells blocks of one list apart: not all of them have the same layers."""
    return tuple((name, param.shape) for name, param in block.named_parameters())


def on_meta(family: BaseFamily) -> DenoiserRoot:
    """Build the root as it is trained, wholly without memory; attention is counted there alone."""
    net = family.source.build(family.denoiser).to("meta")
    if family.cfg.adapter.type is not None:
        family.put_adapters(family.denoiser, net)
    root = DenoiserRoot(family, family.denoiser, net, **family.root_options(net, meta=True)).to("meta")
    for name, param in net.named_parameters():
        param.requires_grad_(not family.is_base(family.denoiser, name))
    return root


def step_on_meta(family: BaseFamily, bucket: Bucket) -> float:
    """Count forward and backward of the root as it is trained, for one sample, by running it without memory."""
    root, inputs = on_meta(family), blank_inputs(family, bucket)
    with FlopCounterMode(display=False) as counter:
        sum(output.sum() for output in root(inputs.x_t, inputs.timestep, inputs.conditions)).backward()
    return float(counter.get_total_flops())


def blank_inputs(
    family: BaseFamily, bucket: Bucket, device: str = "meta", batch: int = 1, texts_of: Bucket | None = None
) -> Inputs:
    """Make inputs of the shapes of a bucket, without content. texts_of: whose texts they have, where not its own,
    and whose references where these have a size of their own.
    """

    def blank(*shape: int) -> torch.Tensor:
        return torch.zeros((batch, *shape), device=device)

    made: dict[str, torch.Tensor] = {}
    for position, text in enumerate(family.texts, start=1):
        if text.part in family.in_root:  # trained with the denoiser: it reads tokens in the step
            chunks = chunks_of(family.cfg.model.max_token_length)
            ids = torch.zeros((batch, chunks, family.lengths[position - 1]), dtype=torch.int64, device=device)
            made[f"input_ids_{position}"] = ids
            continue
        features = family.text_features(position, "float32")
        made |= {name: blank(*feature.shape(texts_of or bucket)) for name, feature in features.items()}
        if text.passes_mask:
            name = mask_name(family.texts, position)
            made[name] = torch.ones_like(made[name], dtype=torch.bool)
    own = family.size_features((bucket.height, bucket.width), batch)
    rows = torch.arange(batch)
    drawn = Batch(bucket, rows, rows, {name: value.to(device) for name, value in own.items()}, {})
    conditions = family.conditions(made, drawn)
    draws = family.features.draws
    if KEEP in draws:
        # which tokens are kept has no bearing on the count, only how many
        conditions[KEEP] = torch.zeros((batch, *draws[KEEP].shape(bucket)), dtype=torch.int64, device=device)
    x = blank(*draws["noise"].shape(bucket))
    area = family.control_area
    shown = x if area is None else blank(*draws["noise"].shape(area.bucket(texts_of or bucket)))
    conditions |= {control_name(number): shown for number in range(family.num_control)}
    if family.row.shown_frames:
        described = shown_frames.features(family).items()
        made_of_frames = {name: blank(*feature.shape(bucket)) for name, feature in described}
        conditions |= shown_frames.conditions(family, made_of_frames, bucket.frames)
    targets = {repa.TERM: x} if family.cfg.repa.encoder is not None else {}
    return Inputs(
        x,
        torch.full((batch,), 500.0, device=device),
        conditions,
        x,
        torch.ones(batch, device=device),
        aux_targets=targets,
    )


# --- Floating-point operations of a UNet and its text encoders, counted from the sizes
# torch's counter gives the same numbers (flops.py), but takes seconds to walk through a UNet, whose blocks all differ.
# A matrix product or convolution of m outputs over k inputs each costs 2 m k; norms, activations and additions count
# nothing. The backward pass of what is trained costs the same twice, for its inputs and for its weights; once where the
# inputs need no gradient (the first layer, the time embeddings, keys and values of a frozen encoder's text). Activations
# and scores computed again are not counted.


Config = Mapping[str, Any]


def unet_step_flops(
    sizes: Mapping[str, Config],
    texts: Sequence[Text],
    latent_hw: tuple[int, int],
    *,
    num_chunks: int,
    trained: Collection[str],
) -> float:
    """Count forward and backward of what is trained, for one sample (SDXL base at 1024 px: 20.2e12).

    sizes: of "unet" and of the text encoders. Frozen encoders are left out, as published figures leave them out.
    """
    unet, context = sizes["unet"], (LENGTH - 2) * num_chunks + 2
    encoders = [text for text in texts if text.part in trained]
    total = 3 * unet_flops(unet, latent_hw, context)
    total -= flops_without_input_gradient(
        unet, latent_hw, context, text=bool(encoders), pooled=any(text.pooled for text in encoders)
    )
    for text in encoders:
        config = sizes[text.part]
        total += 3 * text_flops(config, num_chunks)
        if text.pooled:
            total += 3 * _linear(num_chunks, config["hidden_size"], config["projection_dim"])
        elif isinstance(text.hidden, int):  # layers behind the state that is read have no part in the loss
            total -= 2 * text_flops({**config, "num_hidden_layers": -text.hidden - 1}, num_chunks)
    return float(total)


def text_flops(config: Config, num_chunks: int) -> int:
    """Count one caption through a CLIP text encoder, all layers."""
    width, inner, length = config["hidden_size"], config["intermediate_size"], LENGTH
    layer = _linear(length, width, width) * 4 + _linear(length, width, inner) * 2 + _attention(length, length, width)
    return int(config["num_hidden_layers"]) * layer * num_chunks


def unet_flops(config: Config, size_hw: tuple[int, int], context: int) -> int:
    """Count one latent through the UNet, with `context` text tokens."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    depths = _per_block(config.get("transformer_layers_per_block", 1), len(widths))
    text, embedding = config["cross_attention_dim"], 4 * widths[0]
    h, w = size_hw
    total = _linear(1, widths[0], embedding) + _linear(1, embedding, embedding)
    if added := config.get("projection_class_embeddings_input_dim"):
        total += _linear(1, added, embedding) + _linear(1, embedding, embedding)
    total += _conv(h, w, config["in_channels"], widths[0], 3)

    # --- down
    skips, entering = [(h, w, widths[0])], widths[0]
    for i, width in enumerate(widths):
        depth = depths[i] if "CrossAttn" in config["down_block_types"][i] else 0
        for _ in range(layers):
            total += _resnet(h, w, entering, width, embedding) + _transformer(h * w, width, depth, context, text)
            entering = width
            skips.append((h, w, width))
        if i < len(widths) - 1:
            h, w = -(-h // 2), -(-w // 2)
            total += _conv(h, w, width, width, 3)
            skips.append((h, w, width))

    # --- the middle
    total += 2 * _resnet(h, w, entering, entering, embedding)
    total += _transformer(h * w, entering, depths[-1], context, text)

    # --- up, beside what the way down has left
    for i, width in enumerate(reversed(widths)):
        depth = depths[-1 - i] if "CrossAttn" in config["up_block_types"][i] else 0
        for _ in range(layers + 1):
            h, w, skipped = skips.pop()
            total += _resnet(h, w, entering + skipped, width, embedding)
            total += _transformer(h * w, width, depth, context, text)
            entering = width
        if i < len(widths) - 1:
            total += _conv(skips[-1][0], skips[-1][1], width, width, 3)
    return total + _conv(h, w, widths[0], config["out_channels"], 3)


def flops_without_input_gradient(
    config: Config, size_hw: tuple[int, int], context: int, *, text: bool, pooled: bool
) -> int:
    """Count the forward pass of the UNet's layers whose inputs need no gradient; text, pooled: what is trained too."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    total = _conv(*size_hw, config["in_channels"], widths[0], 3) + _linear(1, widths[0], 4 * widths[0])
    # a layer whose input needs no gradient saves one of the three products of a step
    added = config.get("projection_class_embeddings_input_dim")
    if added and not pooled:  # what is pooled goes in here
        total += _linear(1, added, 4 * widths[0])
    if text:
        return total
    depths = _per_block(config.get("transformer_layers_per_block", 1), len(widths))
    sides = ((config["down_block_types"], widths, depths, layers),
             (config["up_block_types"], widths[::-1], depths[::-1], layers + 1))  # fmt: skip
    wide = widths[-1] * depths[-1]
    for kinds, side_widths, side_depths, repeats in sides:
        wide += sum(w * d * repeats for kind, w, d in zip(kinds, side_widths, side_depths) if "CrossAttn" in kind)
    return total + 2 * _linear(context, config["cross_attention_dim"], wide)


def _per_block(value: int | list[int], num_blocks: int) -> list[int]:
    return [value] * num_blocks if isinstance(value, int) else list(value)


def _conv(h: int, w: int, entering: int, leaving: int, kernel: int) -> int:
    return 2 * h * w * entering * leaving * kernel**2


def _linear(tokens: int, entering: int, leaving: int) -> int:
    return 2 * tokens * entering * leaving


def _attention(queries: int, keys: int, width: int) -> int:
    """Scores and their weighted sum: two products of queries x keys x width."""
    return 4 * queries * keys * width


def _resnet(h: int, w: int, entering: int, leaving: int, embedding: int = 0) -> int:
    shortcut = _conv(h, w, entering, leaving, 1) if entering != leaving else 0
    both = _conv(h, w, entering, leaving, 3) + _conv(h, w, leaving, leaving, 3)
    return both + shortcut + _linear(1, embedding, leaving)


def _transformer(tokens: int, width: int, depth: int, context: int, text: int) -> int:
    """Projections in and out, and per layer: self-attention, attention to the text, GEGLU of 4 x the width."""
    if not depth:
        return 0
    itself = _linear(tokens, width, width) * 4 + _attention(tokens, tokens, width)
    across = _linear(tokens, width, width) * 2 + _linear(context, text, width) * 2 + _attention(tokens, context, width)
    inner = _linear(tokens, width, 8 * width) + _linear(tokens, 4 * width, width)
    return 2 * _linear(tokens, width, width) + depth * (itself + across + inner)
