"""How each door spells fields: the flags of kohya and the keys of train.py, as literal tables."""
