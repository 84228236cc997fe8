"""Models measured over data: what they are asked, what they answer, what comes of it."""
