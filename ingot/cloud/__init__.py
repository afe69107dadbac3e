"""One thin face over each cloud client. Empty until the first of them is needed."""
