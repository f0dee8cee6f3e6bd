"""Who may use how much: tenants, keys, limits, reservations. Redis, nothing of Ray."""
