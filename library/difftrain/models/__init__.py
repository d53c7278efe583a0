"""Model families: the maths of each, where its weights come from and how they are written.

1. registry.py knows every family before torch is imported, in the words of row.py; facts.py are the words a family describes itself in.
2. description.py: what follows from facts and configuration without a weight. weights/find.py finds the weights.
3. base.py: the maths and rules that a family overrides. passes.py runs its blocks, objective/ noises and weighs.
4. family.py: what a trainer asks: parts, encoders, draws. placeholder.py: weights that come later. export.py, flops.py.

Import from its files: configuration reads registry.py, and must not load a family with it.
"""
