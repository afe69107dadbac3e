"""Which records share a training row: planning of row tables, and their files."""
