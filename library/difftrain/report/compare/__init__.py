"""Runs laid side by side, step by step.

1. `comparison` reads them and aligns their steps; `parting` finds the first at which they part; `thresholds` judge.
2. `summary` says it in words, `page` as HTML.
"""
