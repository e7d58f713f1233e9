"""Benchmarks: one harness, one file a benchmark, results under `benchmarks/results/`."""
