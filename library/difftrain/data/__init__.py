"""Data: sources, index, buckets, captions, plan, loader.

This file imports nothing: the processes that read pictures for the index start in a fraction of a second, without torch.
"""
