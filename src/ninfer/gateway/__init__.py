"""Protocol translation only; reaches the engine through its public API."""
