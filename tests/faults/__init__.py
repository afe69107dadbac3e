"""Faults planted one at a time in a copy of the tree: what `make test` would not see."""
