"""Looking at a data set as training will see it: one page of counts, buckets, crops and captions, before anything is trained."""

from difftrain.train.inspect.inspect import debug_dataset, inspect

__all__ = ["debug_dataset", "inspect"]
