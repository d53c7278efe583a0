"""The one training loop, its state and its hooks."""
