"""Proofs on the user's own recipe: tokenizer, data and export."""
