"""From a model name, data and a reward function to a config: `vlrl.train(data=, reward=)`, `vlrl train --data`."""
