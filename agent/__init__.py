"""One process a node: events in, decisions of `tenplexrun.core`, actions out."""
