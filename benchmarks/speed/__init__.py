"""Time of a step, on CPUs and on GPUs."""
