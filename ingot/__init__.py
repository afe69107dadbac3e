"""ingot: raw text in, a served model out."""

__version__ = "0.1.0"
