"""`ingot adopt`: converts configuration files of nine projects to a recipe that loads, with a
list of what could not be converted.

Each project has a file with a table (key -> knob and conversion) and code for keys that only have a
meaning together.
"""
