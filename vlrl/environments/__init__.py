"""External environments: gymnasium, OpenEnv and MCP servers, and classes named by path or module. Does not import
torch.

- `environment.name` selects the environment for a task that does not define one. A task's own `environment` method may
  also return such an environment.
- Everything that a server sends is untrusted: types are checked, sizes and times are limited, images are loaded by
  vlrl.data.media, and only the configured address is contacted.
- If the model's action is malformed, the model gets an error text, and the error is counted. If a server's response is
  malformed, the episode ends with an error and gets no reward.
- The packages that environments need are optional, and imported in the process that runs the environment.
- traffic (with roadview): roads and drivers simulated by highway-env, seen from above; requires the extra `driving`."""
