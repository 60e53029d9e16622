"""Costs of kernels and passes, counted without running them."""
