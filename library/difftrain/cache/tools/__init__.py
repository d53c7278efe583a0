"""What `difftrain cache` does with a cache that is there: info, verify, repair, gc, export."""
