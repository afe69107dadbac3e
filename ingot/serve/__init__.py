"""Serves an exported model folder over HTTP: OpenAI's API and Vertex AI's prediction protocol."""
