"""Real engines behind the gateway: a tiny checkpoint, a worker that computes.  Run by `tools/test --engines`."""
