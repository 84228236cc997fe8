"""Video files: when each frame is shown, which are taken, and their pixels."""
