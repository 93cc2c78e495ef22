"""The parts of the load test and of the comparison: media, client, loops, figures, a look at processes."""
