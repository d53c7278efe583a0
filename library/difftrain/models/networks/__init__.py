"""Denoisers that diffusers does not have, as modules that save and load in its folder layout."""
