"""Models of others behind HTTP, asked."""
