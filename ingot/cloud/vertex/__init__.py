"""Vertex AI's services, one thin face each: jobs, endpoints, models, TensorBoard. No torch."""
