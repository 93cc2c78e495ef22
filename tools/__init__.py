"""Tools around the gateway: set-up, demo, engine stand-in, load test, comparison with the peer.  Nothing in the gateway
needs them.
"""
