"""Vertex AI's services, one thin module each: jobs, endpoints, models, TensorBoard. No torch."""
