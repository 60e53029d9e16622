"""From a rule to modules of compiled code, and where these are kept."""
