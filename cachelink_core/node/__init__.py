"""What both daemons are made of: where the engine, the store and the RPC layer meet."""
