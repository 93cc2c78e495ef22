"""CPU work in forked processes over shared memory; knows nothing of media or HTTP and imports no project code."""
