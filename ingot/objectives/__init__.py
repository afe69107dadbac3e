"""Ways of training: per-token values in, (sum, count, metrics) out. Pure mathematics, no device, no
loop.
"""
