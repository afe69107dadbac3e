"""Low-rank adapters: their layers in a model, and their folders in PEFT's layout."""
