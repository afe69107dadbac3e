"""Faults on purpose: processes killed, machines crashed, files damaged, disks filled."""
