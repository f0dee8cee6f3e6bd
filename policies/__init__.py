"""Decisions: fair queueing, admission, budgets, memory.

Pure Python and numpy. No Ray, torch, Redis or asyncio, and no reading of clocks: time comes in as an argument.
"""
