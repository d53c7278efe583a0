"""Synthetic data, tiny families and one assert_close: for tests, benchmarks and users."""
