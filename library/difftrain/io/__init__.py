"""Files and processes, for every room.

1. files.py        a durable write: aside, fsync, rename, fsync the folder
2. process.py      whether another process still lives, on this machine
"""
