"""How much memory training takes, whole and by its parts."""
