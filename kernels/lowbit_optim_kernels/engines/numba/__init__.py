"""The Numba engine."""
