"""Kernels of lowbit_optim: update rules, state formats and the engines that run them.

This floor knows tensors and numbers and nothing of `torch.optim`.
"""
