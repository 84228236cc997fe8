"""Environments from outside: gymnasium, servers of OpenEnv and MCP, and any class by its address. No torch.

- `environment.name` gives one to a task that has none of its own; a task's own `environment` may return one too.
- What a server says is data of a stranger: types are checked, sizes and times limited, pictures read by
  vlrl.data.media, and nothing is asked of an address but the one that was given.
- What a model wrote wrongly is answered with a text, and counted; what a server does wrongly is an error of the
  episode, which is not paid.
- The packages behind them are optional, and imported by the process that runs the environment.
- traffic (roadview): roads and drivers of highway-env, and how they look from above; extra `driving`.
"""
