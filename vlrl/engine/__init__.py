"""Engines that generate completions: with the training model (hf), with vLLM in this process, and on vLLM servers.

- A request is (prompt, n, sampling); a greedy baseline is an additional request. The interface is in base.py.
- An engine that holds a copy of the weights updates the copy only in `sync`, which is called before every step and
  evaluation, and before the first completion of a resumed run. The code that creates an engine must close it, also
  after an error. Closing removes the engine's files, which are in a folder of the process
  (training.build_engine.engine_folder).
- The hf engine accepts an observer: `watch` is called after every token with the texts decoded so far. `watch` never
  changes a completion, and an exception in `watch` ends the generation.
- A setting that the chosen engine does not have is an error. `engine=vllm` on the command line also drops the settings
  that only the previous engine has, so this one override switches engines.
- An engine reports finished requests by `done` while it decodes the remaining requests. Results never depend on these
  reports. The automatic batch size is computed from the device's total memory, never from the free memory, because the
  last bits of the logits depend on the batch shape.
- During generation, the rows of a group share one copy of their prompt's keys and values (cache.SharedRows). If a model
  does not support this, or has layers with special caches, each row gets its own copy (CopiedRows).
- vllm_server uses HTTP routes that vlrl adds to vLLM, protected by a key (vllm/server.py explains why)."""
