"""Tokens in, tokens out: scheduler, KV cache, model, sampler and the actor around them."""
