"""Samples and episodes as a person or the model sees them: `vlrl play`, previews, and lengths of episodes."""
