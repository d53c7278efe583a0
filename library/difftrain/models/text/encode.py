"""What frozen text encoders make of captions: hidden states, vectors, and the mask of what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import CONTROL, Feature, image_feature
from difftrain.models.facts import Text
from difftrain.models.text.clip_tokens import weigh
from difftrain.models.text.see import Sight
from difftrain.models.text.tokenize import mask_name

if TYPE_CHECKING:
    from torch import Tensor


def outputs_of(texts: Sequence[Text], position: int) -> tuple[str, ...]:
    """Name what one encoder makes; places count from 1."""
    text = texts[position - 1]
    hidden = (f"hidden_{position}",) if text.hidden is not None else ()
    return (*hidden, *((text.pooled_as or f"pooled_{position}",) if text.pooled else ()))


def inputs_of(texts: Sequence[Text], position: int) -> tuple[str, ...]:
    """Name what one encoder reads of the tokenised caption, as far as it is there: ids, and a mask or weights of tokens.

    Lists in a cache are named by this too. Captions have weights where CLIP alone reads them.
    """
    if texts[position - 1].kind != "clip" or texts[position - 1].masked:
        return f"input_ids_{position}", mask_name(texts, position)
    weights = (f"token_weights_{position}",) if all(text.kind == "clip" for text in texts) else ()
    return f"input_ids_{position}", *weights


def features_of(
    texts: Sequence[Text], position: int, length: int, sizes: Mapping[str, Any], dtype: str, sight: Sight | None = None
) -> dict[str, Feature]:
    """Describe what one encoder makes. length: rows of hidden states. sizes: complete ones of the encoder. sight: how it sees."""
    text, names = texts[position - 1], outputs_of(texts, position)
    inner = sizes.get("text_config") or sizes
    width = inner.get("d_model") or inner["hidden_size"]
    made: dict[str, Feature] = {}
    if text.hidden is not None:
        channels = width * max(1, len(text.layers))
        maskable = text.masked and text.zeros
        made[names[0]] = Feature(channels, length=length, dtype=dtype, maskable=maskable, seen=sight)
    if text.passes_mask:
        made[mask_name(texts, position)] = Feature(length, dtype="uint8", seen=sight)
    if text.pooled:
        made[names[-1]] = Feature(sizes["projection_dim"] if text.pooled == "text_embeds" else width, dtype=dtype)
    return made


@torch.no_grad()
def encode(
    texts: Sequence[Text],
    position: int,
    encoder: Any,
    features: Mapping[str, Tensor],
    sight: Sight | None = None,
    kept: Tensor | None = None,
) -> dict[str, Tensor]:
    """Encode the ids of one frozen encoder; see run."""
    return run(texts, position, encoder, features, sight, kept)


def run(
    texts: Sequence[Text],
    position: int,
    encoder: Any,
    features: Mapping[str, Tensor],
    sight: Sight | None = None,
    kept: Tensor | None = None,
) -> dict[str, Tensor]:
    """Encode the ids of one encoder. Shapes: (B, L) -> hidden (B, L - drop, D), pooled (B, P), mask (B, L - drop).

    sight: it sees reference images too, of the samples in `kept`, (B,), where that is said; L grows by their rows.

    Rows behind the mask are zeros where the facts say so. A T5 in fp16 computes without autocast, which would put into
    fp16 what overflows there (placeholder.py keeps those layers wide).
    Captions of CLIP may come in N chunks, (B, N, 77): their states are joined, (B, 75 N + 2, D), and weighed where
    tokens weigh; what is pooled is the first chunk's, as it is.
    """
    text, names = texts[position - 1], outputs_of(texts, position)
    ids, mask = features[f"input_ids_{position}"], features.get(mask_name(texts, position))

    # --- run
    states = bool(text.layers) or isinstance(text.hidden, int)
    options: dict[str, Any] = {"output_hidden_states": True} if states else {}
    if sight is not None:
        assert mask is not None, "texts with images are masked"
        images = [features[image_feature(CONTROL, number)] for number in range(sight.count)]
        ids, mask, more = sight.inputs(ids, mask, images, kept)
        options |= more
    if mask is not None and text.reads_mask:
        options["attention_mask"] = mask.long()
    dtype = encoder.shared.weight.dtype if text.kind == "t5" else next(encoder.parameters()).dtype
    narrow = text.kind == "t5" and dtype == torch.float16
    num_chunks = ids.shape[1] if ids.ndim == 3 else 1
    with torch.autocast(ids.device.type, enabled=False) if narrow else nullcontext():
        reader = encoder.base_model if text.kind == "llm" else encoder  # its words of a whole vocabulary nobody reads
        out = reader(ids.flatten(0, 1) if ids.ndim == 3 else ids, return_dict=True, **options)

    # --- what of it is kept
    made: dict[str, Tensor] = {}
    if text.hidden is not None:
        if text.layers:
            hidden = torch.cat([out.hidden_states[layer] for layer in text.layers], dim=-1)
        else:
            hidden = out.hidden_states[text.hidden] if isinstance(text.hidden, int) else out.last_hidden_state
        if text.normed and isinstance(text.hidden, int):
            hidden = last_norm(encoder)(hidden)
        hidden = join_chunks(hidden, num_chunks)[:, text.drop :]
        if (weights := features.get(f"token_weights_{position}")) is not None:
            hidden = weigh(hidden, join_chunks(weights.flatten(0, 1).unsqueeze(-1), num_chunks).squeeze(-1))
        if text.kind != "clip":
            hidden = hidden.to(dtype)
        filled = None if mask is None else mask.bool()[:, text.drop :]
        if filled is not None and text.zeros:
            hidden = torch.where(filled.unsqueeze(-1), hidden, torch.zeros_like(hidden))
        made[names[0]] = hidden
        if filled is not None:
            made[mask_name(texts, position)] = filled.to(torch.uint8)
    if text.pooled:
        pooled = getattr(out, text.pooled)[::num_chunks]
        # behind a norm, which autocast computes wide on some devices
        made[names[-1]] = pooled.to(dtype) if text.pooled == "pooler_output" else pooled
    return made


def last_norm(encoder: Any) -> Any:
    """Return the last norm of a CLIP text encoder, whose place differs between versions of transformers."""
    return next(module for name, module in encoder.named_modules() if name.endswith("final_layer_norm"))


def join_chunks(states: Tensor, num_chunks: int) -> Tensor:
    """Join (B N, 77, D) to (B, 75 N + 2, D): the first BOS, the inner 75 of every chunk, the last end (kohya)."""
    if num_chunks == 1:
        return states
    states = states.unflatten(0, (-1, num_chunks))
    return torch.cat([states[:, 0, :1], states[:, :, 1:-1].flatten(1, 2), states[:, -1, -1:]], dim=1)
