"""Object storage: buckets with writes conditional on generations, leases, and the replica of a run
folder in a bucket.
"""
