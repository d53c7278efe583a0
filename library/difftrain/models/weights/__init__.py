"""Weights where they lie: found, read and written a tensor at a time, drawn from a seed, told from others."""
