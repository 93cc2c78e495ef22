"""The shapes of the HTTP APIs: JSON to plan, events back.  Nothing below this package knows an API's shape."""
