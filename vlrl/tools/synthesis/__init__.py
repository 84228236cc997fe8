"""New rows, made from rows, from runs and from the answers of a teacher."""
