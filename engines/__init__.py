"""Everything between the gateway and an inference engine: contract, workers, channel, transports, one file each."""
