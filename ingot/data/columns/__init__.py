"""`data/columns/`: prepared columns in Megatron's layout, their manifest, and reading their
parts.
"""
