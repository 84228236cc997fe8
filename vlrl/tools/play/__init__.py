"""Samples and episodes as a person or the model sees them: `vlrl play`, previews, lengths of episodes."""
