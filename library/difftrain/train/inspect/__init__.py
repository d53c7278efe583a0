"""Looking at a data set as training will see it, before anything is trained.

inspect.py opens it as training would, facts.py counts all records, cards.py draws some pictures with their cuts and
captions, findings.py says what stands out; report/dataset_page.py makes a page of these facts.
"""

from difftrain.train.inspect.inspect import debug_dataset, inspect

__all__ = ["debug_dataset", "inspect"]
