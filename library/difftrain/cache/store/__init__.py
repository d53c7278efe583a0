"""Entries on disk: segments and their journals, the index over them, who wants which entries, and reading one."""
