"""The physical plane: sequences, KV and state stores, plans, model transactions."""
