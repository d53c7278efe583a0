"""Looking at a data set as training will see it, before anything is trained.

inspect.py opens it as training would, facts.py counts all records and says what stands out, cards.py draws some
pictures with their cuts and captions; report/dataset_page.py makes a page of these facts.
"""

from difftrain.train.inspect.inspect import debug_dataset, inspect

__all__ = ["debug_dataset", "inspect"]
