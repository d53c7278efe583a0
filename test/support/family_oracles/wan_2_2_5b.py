"""Wan 2.2 5B: as Wan 2.1, with a time for every token and another VAE."""

from __future__ import annotations

from dataclasses import replace

from family_oracles import wan

SMALL = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
ORACLE = replace(wan.ORACLE, released={"ti2v-5B": (SMALL, 825)})
