"""The simulator: the real fair queue and the real engine scheduler in virtual time, over a cost model."""
