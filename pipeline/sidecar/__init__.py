"""The media sidecar: jobs out of Redis, this project's own pipeline, tensors back; `python gateway.py sidecar`.

A vLLM worker in `redis` mode has its media processed by whoever answers its jobs.  The published sidecar of
`smg-grpc-servicer` 0.14 answers them with vLLM's processors; this one speaks the same protocol (version 1) and needs
neither vLLM nor torch nor a GPU.
"""
