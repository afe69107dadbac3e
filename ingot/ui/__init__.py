"""`ingot ui`: the runs of a folder in a browser."""
