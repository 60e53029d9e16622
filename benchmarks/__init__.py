"""Programs that measure the optimizers: `python -m benchmarks.compare`, `.speed`."""
