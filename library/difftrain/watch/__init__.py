"""`difftrain watch`: the runs below a folder on a page, as their files tell of them. Nothing here imports torch.

1. runs.py finds run folders and reads state, progress and the end of the log; no link is followed.
2. pages.py writes what it read as HTML, in the style of the reports.
3. server.py serves the pages on one address, asks for the token, and leaves control files for a run to see.
"""
