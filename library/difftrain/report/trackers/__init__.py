"""Trackers beside metrics.jsonl: one interface, a file each, imported only where it is asked for.

registry.py holds the interface, the names and what is common; a new tracker is one file and one line there. The suite
test/contracts/test_tracker.py runs over the registry.
"""
