"""Google Cloud over loopback, for Google's own clients: each fake answers the paths and message
types that the installed clients carry.
"""
