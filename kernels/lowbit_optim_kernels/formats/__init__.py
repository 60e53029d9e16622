"""State formats: how the moments of a rule are stored."""
