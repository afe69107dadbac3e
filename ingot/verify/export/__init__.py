"""The exported model against the trained one: `proof` is the verb, the others what it compares."""
