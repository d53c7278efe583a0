"""The index: listed (scan.py), looked at (inspection.py), written (build.py, writer.py) and opened (index.py)."""
