"""The embedded demo: data, a small model with a VAE that draws, and the scores of what a run has learned.

The way of a demo:
 1. recipe.py, make.py   which demo a launcher or a recipe names, and where its files are
 2. datasets.py     images and captions: shapes and emoji; splits.py which captions are held out as new
 3. model.py        every part of the real model, small, with a VAE fitted to the data
 4. prepare.py      makes both once, before training
 5. score.py, flow_score.py   what a run has learned; judge.py looks at the images it draws
"""
