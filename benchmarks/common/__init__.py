"""Parts that the programs share."""
