"""The page beside an exported SD3: how to draw with it. Prose, so apart from the family's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ZEROS = """
This model was trained with texts dropped as **zeros**: that is what guidance starts from, not the encoded empty text.

```python
import torch
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained(".")
tokens, _, pooled, _ = pipe.encode_prompt("a red cat", None, None, max_sequence_length={length})
image = pipe(
    prompt_embeds=tokens, pooled_prompt_embeds=pooled,
    negative_prompt_embeds=torch.zeros_like(tokens), negative_pooled_prompt_embeds=torch.zeros_like(pooled),
).images[0]
```
"""
_EMPTY = """
Guidance starts from the **encoded empty text**, which is what diffusers takes where no negative prompt is given.

```python
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained(".")
image = pipe("a red cat", max_sequence_length={length}).images[0]
```
"""
_MASKED = """
T5 was read with its attention mask, and rows at its pad positions were zeros: diffusers' own `encode_prompt` does
neither, so pass `prompt_embeds` that are made so.
"""
_FULL = """
`transformer_full/` holds the transformer as it is trained: with the text branch of its last block, which reconstructs
the text and which the velocity does not need. Training goes on from it; diffusers does not look at it.
"""


def card(told: Mapping[str, Any]) -> str:
    """Write the page. told: what difftrain.json says."""
    kind = "SD3-Light" if told["light"] else "Stable Diffusion 3"
    text = f"# {kind}, {told['num_layers']} joint blocks\n\nWritten by difftrain {told['difftrain']}.\n"
    text += (_ZEROS if told["unconditional"] == "zeros" else _EMPTY).replace("{length}", str(told["t5_max_length"]))
    text += _MASKED if told["t5_attention_mask"] else ""
    return text + (_FULL if told["transformer_full"] else "")
