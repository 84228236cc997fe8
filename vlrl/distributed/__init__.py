"""Several processes: collectives, a watch over the ranks, and the guard of a hanging launcher."""
