"""Model families: the maths of each, where its weights come from and how they are written."""

from difftrain.models.registry import FAMILIES, make_family

__all__ = ["FAMILIES", "make_family"]
