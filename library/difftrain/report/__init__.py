"""What a run says of itself: clock, metric line, trackers, report.json, report.html, CaseName.log.

Everything here is written by one process, and the pages are built from files only. Nothing imports torch at import,
so that `difftrain report` answers at once.
"""
