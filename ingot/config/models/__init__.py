"""Model families as configurations: rows of fields, their sources and sizes. No torch."""
