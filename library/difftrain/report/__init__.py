"""What a run says of itself, and the one builder of HTML pages. Nothing imports torch at import.

1. clock.py measures, line.py and metrics.py write a line a step (metrics.jsonl), trackers/ plot it;
   sessions.py keeps the history over restarts. One process writes.
2. At the end report.py makes report.json and CaseName.log of those files, with facts.py, environment.py, peaks.py and
   evaluations.py.
3. page.py (page.css) and charts.py build pages of plain data: run_page.py report.html, from the run's files alone, and
   dataset_page.py the page of a data set, from the facts that train/inspect gathers.
4. run_files.py reads a run back, complete or not; compare/ compares two by limits, and writes it in lines, as JSON and
   on a page; trace.py compares two traced steps.
"""
