"""What happens to a request, from its JSON to the engine's answer."""
