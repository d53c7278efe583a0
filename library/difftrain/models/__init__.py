"""Model families: the maths of each, where its weights come from and how they are written.

Import from its files: configuration reads registry.py, and must not load a family with it.
"""
