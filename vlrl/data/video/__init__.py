"""Video files: the timestamps of frames, frame sampling, and decoding."""
