"""From drawn prompts to scored groups: generation, filters and refills, partial and asynchronous rollouts."""
