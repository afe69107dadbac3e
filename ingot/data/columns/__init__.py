"""`data/columns/`: prepared columns in Megatron's layout, their manifest, and reading of their
parts.
"""
