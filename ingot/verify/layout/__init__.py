"""Layouts against one process: `proof` is the verb, the others are what it runs and compares."""
