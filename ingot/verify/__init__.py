"""Proofs on the user's own recipe. Empty until the first of them is built."""
