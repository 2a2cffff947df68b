"""The node's tensor store: snapshots in shared memory, served to peers."""
