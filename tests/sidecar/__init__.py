"""The media sidecar: its protocol, its jobs, itself against a real Redis and the published worker's end."""
