"""Cached features: what an encoder makes of pictures and captions, encoded once and read by every process of a machine.

The features of one encoder are cut into parts of fixed content, whatever the number of ranks (layout.py). A part lies in
shared memory, or is a file that is whole or absent under a name that tells what it was made of (places.py). Records and
captions find their entry by number or by hash (store.py); what is to be encoded is decoded in loader workers (work.py).
"""
