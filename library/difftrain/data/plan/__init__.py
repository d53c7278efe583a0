"""The plan: buckets and tables of records, and which of their uses form global batch k."""
