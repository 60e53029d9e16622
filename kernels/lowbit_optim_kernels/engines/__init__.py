"""The engines, one package or module each, and the registry of them."""
