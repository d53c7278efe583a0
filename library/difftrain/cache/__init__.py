"""Cached features: what an encoder makes of pictures and captions is made once, kept on disk or in memory, and read.

The way of a feature:
 1. request.py     which encoders a run asks for, in which dtypes, and whether there is room
 2. manifest/      lists every entry of an encoder by its address, a hash of all that decides the feature
 3. disk.py, locations.py   what of that is missing, and who writes where
 4. decoding.py    loader workers make batches of what is missing
 5. encoding.py    the device encodes them; a thread appends what was made to a segment
 6. store/         segments, their journals, the index over all of them, and what reads an entry
 7. serve.py       hands readers to the data room: from then on a sample takes its features from here
build.py calls them in this order. remote.py reads a cache on an object store; tools/ look at, check, repair, shrink and
export one.
"""
