"""Models: loading and saving, families, processing, packing, attention, log-probabilities.

adapters (LoRA, 4-bit weights), sharding/ (FSDP2, ZeRO), attention_kernels, balance, media_forms, tool_prompts and
vision_cache are imported only when the settings, the model or the data need them.

Families and processing
- All differences between model families are in families.py. A model of unknown type gets a Family derived from its
  config, and is trained in padded rows (one row per completion).
- Engine and trainer use the same Prompt, with rotary positions computed by the model's own rope index.
- Text after a video gets positions after the video's last frame, as in these models' training and in vLLM. transformers
  5.19 assigns other positions; families.py corrects them.
- The processor is called once per sample and reports the visual tokens of each image and video.
- A prompt that is too long is rejected: its id and length are logged, and it is counted.
- Vision-token ids get probability 0, in the engine and in the trainer.

Weights and passes
- Trainable parameters are float32, because small updates vanish in bfloat16. `model.dtype` is the type of autocast and
  of frozen weights.
- Under LoRA the reference is the model with its adapter disabled.
- At most one chunk of logits exists at a time (logprobs.py).
- A tensor read from a file (loading.load_model, adapters.add, store.checkpoint.load_state) is copied to memory
  allocated by torch (store.aligned_memory), because the alignment of operands changes the last bits of results of CPU
  matrix kernels.
- Vision features are computed and cached one image at a time, so that they are bit-identical for every batch and cache
  state. A frozen vision tower builds no autograd graph, also under gradient checkpointing.

Attention of the shared row [prompt | completion 1 | ... | completion G]
- Prompt, images and vision tower are computed once per group, forward and backward. A row may hold several groups.
- attention.attention is registered with transformers as `vlrl_prefix_shared`. The layout of the row is passed as a
  keyword of the model's forward. The mask is a 4-D tensor of one element, so that transformers builds none.
- After the prompt the row is a tree (prefix_tree.py): a common prefix of several completions, including its
  observations and images, is in the row once. Its log-probabilities are computed once and used for each completion.
- The gradient of softmax attention depends on the keys only through the output and the log-sum-exp of each query. The
  flash kernel's backward pass, called with the merged output and log-sum-exp, is therefore exact for each part.
- Inputs without a layout (padded rows) and non-causal attention (the vision tower) use the stock implementation.
  Log-probabilities and gradients of shared and padded rows agree within 1e-5 of each tensor's maximum.
- A group that is too large is cut into pieces, each with a copy of the prompt. Padding exists only inside the
  attention, where runs of tokens whose lengths differ by less than a quarter are batched. Only the implementation
  `masked` uses masks, one for each such batch.

Ranks
- An optimizer step holds the same groups for any number of ranks: all groups are sorted by id and cut into slices
  (cost.optimizer_steps). The rank that trains on a group writes it to the run folder. After scoring, a
  group may move to another rank, but never to another optimizer step.
- Under FSDP all ranks run the same number of micro-batches, and if one of these has media, all have: packing.with_idle
  adds micro-batches that hold a prompt without completions."""
