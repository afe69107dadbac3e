"""Low-rank adapters: their layers in a model, and folders of them in PEFT's layout."""
