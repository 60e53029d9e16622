"""State dicts of other libraries: recognised and rewritten as ours, and ours written as theirs.

A library whose state dicts have to be converted is one object, a `Library`; `load.as_ours` asks
each of them. torch.optim needs none: 32-bit state is laid out as torch.optim's, and loads as it is.
"""
