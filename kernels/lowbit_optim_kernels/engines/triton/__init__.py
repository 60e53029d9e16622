"""The Triton engine."""
