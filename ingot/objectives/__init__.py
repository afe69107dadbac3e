"""Training objectives: per-token values in, (sum, metrics) out. Pure mathematics: no device, no
training loop.
"""
