"""Kernels of lowbit_optim: update rules, the 8-bit codec and the engines that run them.

This floor knows tensors and numbers and nothing of `torch.optim`.
"""
