"""Benchmarks: each prints a table and writes `results/NAME-DEVICE.json`. Run with `python -m benchmarks NAME ...`."""
