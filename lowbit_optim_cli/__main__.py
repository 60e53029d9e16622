"""`python -m lowbit_optim_cli`, the command without its entry point."""

from . import main

main()
