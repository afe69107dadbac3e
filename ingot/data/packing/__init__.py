"""Which records share a training row: the planning of row tables, and their files."""
