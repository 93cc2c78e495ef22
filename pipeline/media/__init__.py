"""Encoded bytes to pixels, frames or samples.  Runs in pool processes."""
