"""Proofs on the user's own recipe: tokenizer, data, export, resume, layouts; and `ingot bench`."""
