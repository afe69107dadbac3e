"""Training state on disk, complete or not there at all; the exported model folder."""
