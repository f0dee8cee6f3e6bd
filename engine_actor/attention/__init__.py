"""Attention over the paged KV cache: one contract, several backends."""
