"""Object storage: buckets by generation conditions, leases on them, and the replica of a run folder
that lies in one.
"""
