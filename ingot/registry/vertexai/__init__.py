"""The Model Registry and the endpoints of Vertex AI: versions, live pointer, rollout."""
