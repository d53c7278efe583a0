"""What Lumina Image 2.0 and its descendants share: text and images refined apart, then blocks over one sequence of all.

Texts are of many lengths: a sample's images follow the last token of its caption, and padding stands behind them, where
nobody looks at it. So a sequence is as long as text and images together at any caption, and the host never waits for a
length. Positions are looked up in tables of each axis, real-valued.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.device.rotary import tables_of_pairs
from difftrain.models.facts import Lora
from difftrain.models.family import ModelFamily
from difftrain.models.passes import laid, packed
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor


class OneStreamFamily(ModelFamily):
    """Facts, layout and sizes of such a transformer; a family says where its tokens lie and what refines them."""

    blocks: tuple[str, ...] = ("context_refiner", "noise_refiner", "layers")
    zero = r"\.norm1\.linear\.|^norm_out\."
    leaving = r"norm_out\b"
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "linear_1", "linear_2", "linear_3"))

    # ------------------------------------------------------------------ the sequence

    def caption_mask(self, text: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Return which tokens are a caption's, (B, L) bool: all where no mask is passed."""
        mask = conditions.get("mask")
        return text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask

    def cells(self, size: Hashable, make: Callable[[], Tensor], device: Any) -> Tensor:
        """Return positions (S, 3) of tokens as if no text were before the images, made and moved once a size."""
        return self.once(("cells", size, device), lambda: make().to(device, torch.int64))

    def lay_out(
        self, net: Any, is_token: Tensor, cells: Tensor, moved: Tensor, lengths: Sequence[int]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Lay out each sample's sequence. Shapes: is_token, moved (B, S); cells (S, 3).

        moved: how far a token lies behind its cell on the first axis. lengths: of the parts, S in all. Returns what
        `over_all` takes, and of each part its rotary tables: cosines and sines, (2, B, ., D).
        """
        order, back, seen = packed(is_token)
        apart = self._looked_up(net, cells + F.pad(moved.unsqueeze(-1), (0, 2)))
        joint = apart.gather(2, order[None, :, :, None].expand_as(apart))
        return {"order": order, "back": back, "seen": seen, "joint": joint}, apart.split(list(lengths), dim=2)

    def _looked_up(self, net: Any, lies: Tensor) -> Tensor:
        """Look positions (B, S, 3) up in the tables of each axis, real-valued: (2, B, S, D)."""
        tables = self.rotary("axes", lies.device, lambda: net.rope_embedder.freqs_cis)
        turned = [F.embedding(lies[..., axis], table) for axis, table in enumerate(tables)]
        return torch.stack(tables_of_pairs(torch.cat(turned, dim=-1)))

    @staticmethod
    def over_all(block: Any, parts: Sequence[Tensor], more: Mapping[str, Tensor], temb: Tensor) -> tuple[Tensor, ...]:
        """Run one block over the sequence of all parts, which come back as they are, (B, ., D)."""
        joined = laid(torch.cat(list(parts), dim=1), more["order"])
        joined = block(joined, more["seen"], more["joint"].unbind(0), temb)
        return laid(joined, more["back"]).split([part.shape[1] for part in parts], dim=1)

    # ------------------------------------------------------------------ sizes

    @staticmethod
    def sizes(shapes: Mapping[str, tuple[int, ...]], entering: str, norm: str) -> dict[str, Any]:
        """Read what is common off the tensors that are called so. Raises KeyError."""
        width, channels = shapes[entering]
        head = shapes[norm][0]
        return {
            "in_channels": channels // 4,
            "hidden_size": width,
            "num_layers": count(shapes, r"layers\.(\d+)\."),
            "num_refiner_layers": count(shapes, r"noise_refiner\.(\d+)\."),
            "num_attention_heads": width // head,
            "axes_dim_rope": [head // 3] * 3,
        }
