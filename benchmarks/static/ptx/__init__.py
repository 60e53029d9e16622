"""An emulator of the PTX that Triton compiles: GPU kernels are run and measured without a GPU.

`parser` reads the text, `arithmetic` and `instructions` compute, `memory` has what kernels address,
checks every access and counts what it costs, `machine` runs threads, `launch` takes the place of
Triton's launches. All threads of some programs of a launch are one NumPy axis.
"""
