"""The native CPU executor: a whole decoder step in one call of compiled code."""
