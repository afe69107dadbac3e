"""An exported model folder behind HTTP: OpenAI's routes and Vertex AI's prediction contract. Trains
nothing, registers nothing.
"""
