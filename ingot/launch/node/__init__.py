"""What runs on each node of a job: starts the node's ranks and ends with them. No torch."""
