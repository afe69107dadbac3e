"""Folders that earlier versions of ingot wrote."""
