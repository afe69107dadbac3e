"""`ingot adopt`: configuration files of five older projects become a recipe that loads, and a list
of what could not be carried over.

Each project is a table (key -> knob and conversion) in a file of its own, with the little that
several keys mean together.
"""
