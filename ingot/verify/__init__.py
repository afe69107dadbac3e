"""Proofs on the user's own recipe: tokenizer and data."""
